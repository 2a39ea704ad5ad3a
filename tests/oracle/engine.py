"""Loads the shared library that is the argument, in which the shim is, after and before torch was imported.

Prints the engine that the shim finds in the place of libtorch's own, and a line that shows that Python's hooks and
backward passes still work. Prints None first if the shim has replaced Python's engine.
"""

import ctypes
import sys

order, path = sys.argv[1:]


def other_engine():
    prepare = ctypes.CDLL(path).tamp_saved_tensors_prepare
    prepare.restype = ctypes.c_void_p
    error = ctypes.c_char_p()
    engine = prepare(ctypes.byref(error))
    assert error.value is None, error.value
    return None if engine is None else ctypes.cast(engine, ctypes.c_char_p).value.decode()


if order == "before":
    assert other_engine() is None

import torch  # noqa: E402

print(other_engine())
x = torch.ones(3, requires_grad=True)
seen = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t * 2):
    y = x.square().sum()
y.backward()
print(len(seen), x.grad.tolist())
