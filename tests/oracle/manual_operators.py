"""Calls what the manual of torch.amp names as Python does, and prints which operators of libtorch each calls."""

import json

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

x = torch.rand(4, 4) + 0.1
classes = torch.zeros(4, dtype=torch.long)

calls = {
    "__matmul__": lambda: x @ x,
    "multi_dot": lambda: torch.linalg.multi_dot([x, x, x]),
    "GRUCell": lambda: torch.nn.GRUCell(4, 4)(x),
    "LSTMCell": lambda: torch.nn.LSTMCell(4, 4)(x),
    "RNNCell": lambda: [torch.nn.RNNCell(4, 4, nonlinearity=name)(x) for name in ("tanh", "relu")],
    "__pow__": lambda: x**2.0,
    "__rpow__": lambda: 2.0**x,
    "__rdiv__": lambda: x.__rdiv__(2.0),
    "__rtruediv__": lambda: 2.0 / x,
    "cross_entropy": lambda: F.cross_entropy(x, classes),
    "normalize": lambda: F.normalize(x),
    "softmin": lambda: F.softmin(x, -1),
    "grid_sample": lambda: F.grid_sample(x.reshape(1, 1, 4, 4), x.reshape(1, 2, 4, 2), align_corners=False),
}


def operators(call):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    names = {event.name for event in profiler.events()}
    return sorted(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


print(json.dumps({name: operators(call) for name, call in calls.items()}))
