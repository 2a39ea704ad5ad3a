"""Runs programs of nested autocast regions: one operation a line on stdin, one answer a line on stdout.

tests/regions/autocast/programs/program.rs writes the operations and says what each means. An answer is the autocast state of
the CPU after the operation, then what the operation gave: nothing, a tensor's dtype and bits, or an error's first line.

The argument says whose lists decide what is cast, "cpu" or "cuda". All is computed on the CPU, and where the lists of
CUDA say otherwise of an operation, the casts are written out below.
"""

import contextlib
import re
import sys
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from bits import bits  # noqa: E402

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLAGS = {"0": False, "1": True, "-": None}
LISTS = sys.argv[1]


def message(error):
    """The first line, with C++'s names of tensor types: libtorch says Python's once Python's are loaded."""
    return re.sub(r"torch\.(\w+)Tensor", r"CPU\1Type", str(error).splitlines()[0])


def in_f32(a):
    """Whether the lists of CUDA have an operation on `a` computed in f32, as they do with softmax and layer_norm."""
    return LISTS == "cuda" and torch.is_autocast_enabled("cpu") and a.dtype != torch.float64


def softmax(a):
    return F.softmax(a, -1, dtype=torch.float32 if in_f32(a) else None)


def layer_norm(a):
    return F.layer_norm(a.float() if in_f32(a) else a, (4,))


def cat(a, b):
    # It is in none of the lists of CUDA: it promotes by itself.
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(key) if LISTS == "cuda" else contextlib.nullcontext():
        return torch.cat([a, b]).narrow(0, 0, 4)


COMPUTE = {
    "mm": torch.mm,
    "linear": F.linear,
    "conv": lambda a, k: F.conv2d(a.reshape(1, 1, 4, 4), k.reshape(1, 1, 4, 4)[:, :, :3, :3], padding=1).reshape(4, 4),
    "add": torch.add,
    "cat": cat,
    "softmax": softmax,
    "layer_norm": layer_norm,
}


class Machine:
    """The tensors of a program and the regions it has open."""

    def __init__(self):
        self.values = []
        self.regions = []

    def enter(self, dtype, enabled, cache):
        self.change(lambda: self.open(torch.autocast("cpu", DTYPES.get(dtype), FLAGS[enabled], FLAGS[cache])))

    def open(self, region):
        region.__enter__()
        self.regions.append(region)

    def exit(self):
        self.change(lambda: self.regions.pop().__exit__(None, None, None))

    def change(self, step):
        """Where the dtype changes inside a region, PyTorch goes on using the casts to the old one: its weight cache is
        keyed by the weight alone. tch-amp clears the cache there, so that is done here, too."""
        before = torch.get_autocast_dtype("cpu")
        step()
        if torch.get_autocast_dtype("cpu") != before:
            torch.clear_autocast_cache()

    def tensor(self, dtype, leaf, *values):
        rows = [[float(v) for v in values[i : i + 4]] for i in range(0, 16, 4)]
        # Not a view: casts of views are not cached.
        value = torch.tensor(rows, dtype=DTYPES[dtype])
        return self.keep(value.requires_grad_(FLAGS[leaf]))

    def keep(self, value):
        self.values.append(value)
        return value

    def compute(self, op, *places):
        operands = [self.values[int(place)] for place in places]
        try:
            return self.keep(COMPUTE[op](*operands))
        except RuntimeError:
            # So that later operations have something under this number.
            self.keep(operands[0])
            raise

    def nudge(self, place):
        with torch.no_grad():
            self.values[int(place)].add_(0.125)

    def backward(self, place):
        self.values[int(place)].sum().backward()

    def run(self, op, args):
        if op == "grad_mode":
            torch.set_grad_enabled(FLAGS[args[0]])
        elif op == "grad":
            return self.values[int(args[0])].grad
        elif op in COMPUTE:
            return self.compute(op, *args)
        else:
            return getattr(self, op)(*args)

    def close(self):
        torch.set_grad_enabled(True)
        while self.regions:
            self.exit()


def state():
    flags = f"{torch.is_autocast_enabled('cpu'):d} {torch.is_autocast_cache_enabled():d}"
    return f"{flags} {NAMES[torch.get_autocast_dtype('cpu')]}"


def main():
    torch.set_num_threads(1)
    if LISTS == "cuda":
        # The dtype of a region on CUDA that asks for none.
        torch.set_autocast_dtype("cpu", torch.float16)
    machine = Machine()
    for line in sys.stdin:
        op, *args = line.split()
        if op == "program":
            machine.close()
            machine = Machine()
            print(state())
            continue
        try:
            result = machine.run(op, args)
            told = "" if result is None else f" {NAMES[result.dtype]} {bits(result)}"
        except RuntimeError as error:
            told = " error " + message(error)
        print(state() + told)


main()
