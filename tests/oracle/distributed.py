"""Trains with DistributedDataParallel: JSON [ranks, [configuration, ...]] on stdin, and on stdout a line of JSON for
each configuration, with the bits of the parameters and buffers of each rank.

tests/processes/distributed/training.rs trains the same.
"""

import contextlib
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

sys.dont_write_bytecode = True
import ranks
from bits import bits

WIDTH, ROWS, SCALE, GROWTH_INTERVAL = 24, 6, 1024.0, 2


def numbers(shape, seed):
    """Small numbers that both sides compute exactly."""
    count = 1
    for size in shape:
        count *= size
    places = torch.arange(count, dtype=torch.int64)
    return ((places * 37 + seed * 101 + (places * places) * 11).remainder(211) - 105).view(shape).float() / 256


class Net(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        for index, (name, shape) in enumerate(
            [("w1", [WIDTH, WIDTH]), ("b1", [WIDTH]), ("bn", [WIDTH]), ("extra", [WIDTH]), ("w2", [5, WIDTH])]
        ):
            setattr(self, name, torch.nn.Parameter(numbers(shape, seed + index)))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, xs, with_extra):
        xs = functional.linear(xs, self.w1, self.b1)
        if with_extra:
            xs = xs + self.extra
        xs = functional.batch_norm(xs, self.mean, self.var, self.bn, None, True, 0.1, 1e-5)
        return functional.linear(xs.relu(), self.w2)


def train(rank, config):
    net = Net(7 + rank)
    ddp = DistributedDataParallel(
        net,
        bucket_cap_mb=config["bucket_cap_mb"],
        find_unused_parameters=config["unused"],
        gradient_as_bucket_view=config["bucket_view"],
    )
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    if config["compression"]:
        ddp.register_comm_hook(None, hooks[config["compression"]])
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWTH_INTERVAL, enabled=config["scaled"])
    options = {"lr": 0.0625, "momentum": 0.5, "fused": True}
    if config["zero"]:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, **options)
    else:
        optimizer = torch.optim.SGD(net.parameters(), **options)
    for step in range(20):
        optimizer.zero_grad()
        count = 3 if config["no_sync"] else 1
        for micro in range(count):
            with ddp.no_sync() if micro + 1 < count else contextlib.nullcontext():
                seed = 1000 * step + 10 * micro + rank
                with_extra = not config["unused"] or (step + rank) % 3 == 0
                with torch.autocast("cpu", torch.bfloat16, enabled=config["autocast"]):
                    out = ddp(numbers([ROWS, WIDTH], seed), with_extra)
                loss = (out.float() - numbers([ROWS, 5], seed + 1)).square().mean()
                if config["scaled"] and step % 5 == 1 and rank == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    tensors = [*net.parameters(), *net.buffers()]
    return [scaler.get_scale(), [bits(tensor) for tensor in tensors]]


def run(rank, count, configs, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=count)
    for index, config in enumerate(configs):
        with open(f"{folder}/{index}.{rank}", "w") as file:
            json.dump(train(rank, config), file)
        dist.barrier()
    dist.destroy_process_group()


def main():
    count, configs = json.load(sys.stdin)
    with ranks.ended(count, lambda rank, folder: run(rank, count, configs, folder)) as folder:
        for index in range(len(configs)):
            print(json.dumps([json.load(open(f"{folder}/{index}.{rank}")) for rank in range(count)]), flush=True)


main()
