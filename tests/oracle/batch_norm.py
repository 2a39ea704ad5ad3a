"""Prints what torch.optim.swa_utils.update_bn makes of statistics: JSON [case, ...] on stdin, and on stdout a line of
JSON for each: [mean, variance, number of batches] of each layer, and the outputs of all calls.

A case has `layers` and `batches`. A layer has `momentum`, or null, whether it is one of `instances`, whether it `trains`,
the `mean` and the `variance` that it has before, and `as`, the place of an earlier layer with the same statistics, or
null. A batch is a list of calls: the place of a layer and its input, of the shape [2, 3, 4].
"""

import json
import sys

import torch
from torch.optim import swa_utils

CHANNELS = 3


class Model(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList()
        self.outputs = []
        for options in layers:
            kind = torch.nn.InstanceNorm1d if options["instances"] else torch.nn.BatchNorm1d
            layer = kind(CHANNELS, momentum=options["momentum"], affine=False, track_running_stats=True)
            if options["as"] is not None:
                first = self.layers[options["as"]]
                for name in ("running_mean", "running_var", "num_batches_tracked"):
                    setattr(layer, name, getattr(first, name))
            else:
                layer.running_mean.copy_(torch.tensor(options["mean"]))
                layer.running_var.copy_(torch.tensor(options["variance"]))
            if not options["trains"]:
                layer.eval()
                layer.train = lambda mode=True, layer=layer: layer
            self.layers.append(layer)

    def forward(self, batch):
        for place, numbers in batch["calls"]:
            self.outputs.append(self.layers[place](torch.tensor(numbers).view(2, CHANNELS, 4)))


def updated(case):
    model = Model(case["layers"])
    with torch.no_grad():
        swa_utils.update_bn([{"calls": calls} for calls in case["batches"]], model)
    statistics = [
        [layer.running_mean.tolist(), layer.running_var.tolist(), layer.num_batches_tracked.item()]
        for layer in model.layers
    ]
    return [statistics, [output.flatten().tolist() for output in model.outputs]]


torch.set_num_threads(1)
for case in json.load(sys.stdin):
    print(json.dumps(updated(case)))
