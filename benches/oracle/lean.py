"""The Python side of benches/lean.rs: answers a line for each line."""

import sys
from time import perf_counter_ns

import torch
from torch.nn import functional as F

from resident import peak

torch.set_num_threads(1)


def values(rows, columns, factor):
    places = torch.arange(rows * columns)
    spread = (places * factor + 7).remainder(8191).float()
    return ((spread - 4095.0) / 1024.0).view(rows, columns)


class Operands:
    def __init__(self, tokens, width, words):
        self.hidden = values(tokens, width, 4099).requires_grad_()
        self.weight = (values(words, width, 5167) / 64.0).requires_grad_()
        self.targets = (torch.arange(tokens) * 7919).remainder(words)

    def usual(self, dtype):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            logits = F.linear(self.hidden, self.weight).float()
            return F.cross_entropy(logits, self.targets)

    def own(self, dtype):
        """torch's own function, which older versions lack; with casts by hand, because a region does not cast for it."""
        if not hasattr(F, "linear_cross_entropy"):
            return None
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        return F.linear_cross_entropy(self.hidden.to(kind), self.weight.to(kind), self.targets)

    def iterate(self, loss, dtype):
        self.hidden.grad = self.weight.grad = None
        start = perf_counter_ns()
        value = loss(dtype)
        if value is None:
            return None, float("nan")
        value.backward()
        return value, perf_counter_ns() - start


def memory(loss, dtype, operands):
    for leaf in (operands.hidden, operands.weight):
        (leaf.sum() * 0).backward()
    return peak(lambda: loss(dtype).backward())


kept = {}
for line in sys.stdin:
    what, *size, dtype = line.split()
    size = tuple(map(int, size))
    operands = kept.setdefault(size, Operands(*size))
    if what == "loss":
        print(operands.iterate(operands.usual, dtype)[0].item(), flush=True)
    elif what.startswith("memory"):
        # A small one first makes what the process keeps.
        small = Operands(8, 16, 16)
        way = what.removeprefix("memory_")
        known = small.iterate(getattr(small, way), dtype)[0] is not None
        print(memory(getattr(operands, way), dtype, operands) if known else "nan", flush=True)
    else:
        print(operands.iterate(operands.usual, dtype)[1], operands.iterate(operands.own, dtype)[1], flush=True)
