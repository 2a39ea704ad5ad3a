"""The Python side of benches/distributed.rs: two ranks, which are forked processes. Rank 0 answers a line for each line."""

import contextlib
import os
import sys
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
NAMES = ["small", "large", "half", "views"]


def values(index, shape):
    count = 1
    for size in shape:
        count *= size
    places = torch.arange(count, dtype=torch.int64)
    return (((places * 11 + index * 3).remainder(64) - 32).float() / 1024).view(shape)


class Model(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.is_small = name == "small"
        shapes = [[16]] * 400 if self.is_small else [[1024, 1024]] * 6
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(values(i, s)) for i, s in enumerate(shapes)])

    def forward(self, xs):
        for weight in self.weights:
            xs = xs * (weight + 1.0) if self.is_small else torch.nn.functional.linear(xs, weight).tanh()
        return xs.square().mean()


def train(name, rank, iterations):
    model = Model(name)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=name == "views")
    if name == "half":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    xs = values(7 + rank, [16] if name == "small" else [8, 1024])
    times = []
    for _ in range(iterations):
        start = time.perf_counter_ns()
        optimizer.zero_grad()
        ddp(xs).backward()
        optimizer.step()
        times.append(time.perf_counter_ns() - start)
    # Of the bits, so that both sides must agree exactly.
    total = sum(weight.detach().view(torch.int32).long().sum().item() for weight in model.weights)
    return median(times), total


def rank_main(rank, folder, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    while True:
        request = torch.zeros(2, dtype=torch.int64)
        if rank == 0 and (line := sys.stdin.readline()):
            name, iterations = line.split()
            request[0], request[1] = NAMES.index(name), int(iterations)
        dist.broadcast(request, 0)
        name, iterations = request.tolist()
        if iterations == 0:
            return
        time_, total = train(NAMES[name], rank, iterations)
        if rank == 0:
            print(f"{time_} {total}", file=answers, flush=True)


def main():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            # The benchmark ends rank 0 at the end, which is an error of the other one.
            with contextlib.suppress(RuntimeError):
                rank_main(1, folder, sys.stdout)
            os._exit(0)
        rank_main(0, folder, sys.stdout)
        os.waitpid(child, 0)


main()
