"""The Python side of benches/saved_tensors.rs: answers a line for each line.

`model FILE` makes the small GPT of benches/oracle/training.py and saves its weights. `bits WAY` answers with a sum over
the bits of its gradients in bf16, `time WAY` with the nanoseconds of a forward and a backward pass, and `memory WAY`
with the bytes by which these raise the resident memory at its peak.
"""

import contextlib
import sys
from time import perf_counter_ns

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from resident import peak
from training import MODELS

torch.set_num_threads(1)


def made(way):
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    if way == "checkpoint":
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda xs, forward=forward: checkpoint(forward, xs, use_reentrant=False)
    torch.manual_seed(1)
    return model, model.batch()


def run(model, batch, way):
    kept = save_on_cpu() if way == "on_host" else contextlib.nullcontext()
    with kept, torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(*batch)
    loss.backward()


def bits(way):
    model, batch = made(way)
    run(model, batch, way)
    named = sorted(model.named_parameters())
    flat = torch.cat([parameter.grad.view(-1) for _, parameter in named]).view(torch.int32).long()
    return (flat * torch.arange(1, len(flat) + 1)).sum().item()


def memory(way):
    model, batch = made(way)
    # The first pass makes what the process keeps.
    run(model, batch, way)
    return peak(lambda: run(model, batch, way))


def time(way):
    if way not in kept:
        kept[way] = made(way)
    start = perf_counter_ns()
    run(*kept[way], way)
    return perf_counter_ns() - start


kept = {}
for line in sys.stdin:
    command, word = line.split()
    if command == "model":
        torch.save({"model": made("plain")[0].state_dict()}, word)
        answer = "saved"
    else:
        answer = {"bits": bits, "memory": memory, "time": time}[command](word)
    print(answer, flush=True)
