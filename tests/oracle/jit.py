"""Writes TorchScript files, and reads those that were frozen.

`write FILE eval|train` writes a scripted module with parameters and buffers, in this mode. `read FILE FROZEN` loads
both, freezes the first, and compares the two frozen modules: it prints whether their outputs have the same bits, and
how many parameters the one in FROZEN has.
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
command, file, last = sys.argv[1:]
if command == "write":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    with torch.no_grad():
        model[1].running_mean.uniform_()
        model[1].running_var.uniform_(1, 2)
    torch.jit.save(torch.jit.script(model.train(last == "train")), file)
else:
    frozen = torch.jit.load(last)
    expected = torch.jit.freeze(torch.jit.load(file))
    inputs = torch.arange(2 * 3 * 8 * 8).reshape(2, 3, 8, 8).sin()
    with torch.no_grad():
        outputs = [[module(inputs) for _ in range(3)] for module in (expected, frozen)]
    equal = all(torch.equal(one, other) for one, other in zip(*outputs))
    print("equal" if equal else "different", len(list(frozen.parameters())))
