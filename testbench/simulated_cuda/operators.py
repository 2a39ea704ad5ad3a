"""Lists the operators that have a CUDA kernel, from the native_functions.yaml of the same PyTorch.

    python operators.py native_functions.yaml operators.inc

The file is read line by line and not as YAML, which Python's own library has no reader for.
"""

import re
import sys
from pathlib import Path


class Operator:
    """One entry of native_functions.yaml."""

    def __init__(self, entry):
        lines = entry.split("\n")
        self.name = entry[: entry.index("(")].strip()
        self.delegate = None
        # Whether PyTorch checks that all tensors are on one device.
        self.is_checked = True
        self.keys = set()
        in_dispatch = False
        for line in lines[1:]:
            if re.match(r"    [^\s#]", line) and in_dispatch:
                self.keys |= {key.strip() for key in line.split(":")[0].split(",")}
            elif re.match(r"  \S", line):
                in_dispatch = line.startswith("  dispatch:")
                self.see_field(line)

    def see_field(self, line):
        field, _, value = line.partition("#")[0].strip().partition(": ")
        if field == "structured_delegate":
            self.delegate = value
        elif field == "ufunc_inner_loop:":
            self.keys |= {"CPU", "CUDA"}
        elif field == "device_check":
            self.is_checked = value != "NoCheck"

    def has_kernel(self, key, operators):
        """A structured operator shares the kernel of the one it delegates to."""
        if key in self.keys:
            return True
        return self.delegate is not None and operators[self.delegate].has_kernel(key, operators)


# Written by hand in tensors.cpp.
OWN = {"empty.memory_format", "empty_strided", "copy_", "set_.source_Storage", "set_.source_Storage_storage_offset"}


def main(functions, out):
    entries = re.split(r"(?m)^- func: ", Path(functions).read_text())[1:]
    operators = {operator.name: operator for operator in map(Operator, entries)}
    lines = []
    for operator in operators.values():
        if operator.has_kernel("CUDA", operators) and operator.name not in OWN:
            lines.append(f'SIMULATED_CUDA("{operator.name}", {str(operator.is_checked).lower()})')
        if operator.has_kernel("SparseCUDA", operators):
            lines.append(f'SIMULATED_SPARSE_CUDA("{operator.name}")')
    if len(lines) < 1000:
        sys.exit(f"{functions}: only {len(lines)} operators with a CUDA kernel; has its format changed?")
    Path(out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
