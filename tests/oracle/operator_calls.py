"""Profiles programs with torch.profiler, and prints how often each operator was called, not counting calls that call
an operator of the same name. The FLOPs are those of torch.utils.flop_counter."""

import collections
import json

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
# It knows the kernels of CUDA only.
KERNELS = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, out_shape=None, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, out_shape=None, **__: (
        sdpa_backward_flop_count(g, q, k, v)
    ),
}


def linear():
    first = torch.nn.Linear(16, 32)
    last = torch.nn.Linear(32, 10)
    x = torch.ones(8, 16)

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(last(first(x).relu()), torch.zeros(8, 10))
        loss.backward()

    return run


def convolution():
    layer = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
    x = torch.ones(2, 3, 9, 9)

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
            loss = y.float().square().mean()
        loss.backward()

    return run


def attention():
    q, k, v = (torch.ones(2, 2, 16, 8, requires_grad=True) for _ in range(3))

    def run():
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        y.softmax(-1).sum().backward()

    return run


def contains(event, name):
    return any(child.name == name or contains(child, name) for child in event.cpu_children)


def calls(run):
    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    innermost = [event.name for event in profiler.events() if not contains(event, event.name)]
    names = collections.Counter(name for name in innermost if name.startswith("aten::"))
    counter = FlopCounterMode(display=False, custom_mapping=KERNELS)
    with counter:
        run()
    return {"calls": names, "flops": counter.get_total_flops()}


programs = {"linear": linear, "convolution": convolution, "attention": attention}
print(json.dumps({name: calls(program()) for name, program in programs.items()}))
