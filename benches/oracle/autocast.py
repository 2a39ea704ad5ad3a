"""The Python side of benches/autocast.rs: answers a line for each line."""

import struct
import sys
import time

import torch
from torch import autocast


def new(count):
    start = time.perf_counter_ns()
    for _ in range(count):
        with autocast("cpu"):
            pass
    return (time.perf_counter_ns() - start) / count


def reused(count):
    region = autocast("cpu")
    start = time.perf_counter_ns()
    for _ in range(count):
        with region:
            pass
    return (time.perf_counter_ns() - start) / count


def nested(count):
    start = time.perf_counter_ns()
    for _ in range(count):
        with autocast("cpu"):
            with autocast("cpu"):
                pass
    return (time.perf_counter_ns() - start) / count


def state():
    left = torch.tensor([[1.0, 2.5], [-3.0, 0.126]])
    product = left @ left
    bits = "".join(struct.pack(">d", value).hex() for value in product.double().view(-1).tolist())
    enabled = str(torch.is_autocast_enabled("cpu")).lower()
    dtypes = (torch.get_autocast_dtype("cpu"), product.dtype)
    return " ".join([enabled, *(str(dtype).removeprefix("torch.") for dtype in dtypes), bits])


def states():
    out = [state()]
    with autocast("cpu"):
        out.append(state())
        with autocast("cpu", dtype=torch.float16):
            out.append(state())
        with autocast("cpu", enabled=False):
            out.append(state())
        out.append(state())
    out.append(state())
    return ";".join(out)


def main():
    torch.set_num_threads(1)
    timed = {"new": new, "reused": reused, "nested": nested}
    for line in sys.stdin:
        name, *args = line.split()
        answer = states() if name == "states" else timed[name](int(args[0]))
        print(answer, flush=True)


main()
