"""Prints the operators that take running statistics although their schemas do not say that they are written."""

import torch

names = set()
for schema in torch._C._jit_get_all_schemas():
    arguments = [a for a in schema.arguments if a.name in ("running_mean", "running_var")]
    if arguments and all(a.alias_info is None for a in arguments):
        names.add(schema.name)
print("\n".join(sorted(names)))
