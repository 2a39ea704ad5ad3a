"""Prints the averages of torch.optim.swa_utils.AveragedModel: JSON [case, ...] on stdin, and on stdout a line of JSON
for each, the numbers of the average after each update.

A case has `decay`, or null for an equal average, a dtype, and the numbers of a parameter for each update. An average in
f32 of parameters in half precision is that of an f32 model with the same numbers.
"""

import json
import sys

import torch
from torch.optim import swa_utils

DTYPES = {"Float": torch.float32, "Double": torch.float64, "BFloat16": torch.bfloat16, "Half": torch.float16}


def averages(case):
    given = [torch.tensor(numbers, dtype=torch.float64).to(DTYPES[case["dtype"]]) for numbers in case["updates"]]
    if case["dtype"] != "Double":
        given = [numbers.float() for numbers in given]
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(given[0].clone())
    decay = case["decay"]
    update = swa_utils.get_swa_multi_avg_fn() if decay is None else swa_utils.get_ema_multi_avg_fn(decay)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=update)
    for numbers in given:
        with torch.no_grad():
            model.w.copy_(numbers)
        averaged.update_parameters(model)
        yield averaged.module.w.tolist()


torch.set_num_threads(1)
for case in json.load(sys.stdin):
    print(json.dumps(list(averages(case))))
