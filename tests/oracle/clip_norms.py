"""Clips gradients with torch.nn.utils.clip_grad_norm_: JSON [case, ...] on stdin, and on stdout a line of JSON for each.

A case has a dtype, `norm_type`, `max_norm`, and the numbers of each gradient. The answer has `norm`, as text because
an fp16 one may be infinite, the clipped `gradients`, and `exact`, the norm of the same gradients as one vector in f64.
"""

import json
import sys

import torch

DTYPES = {"Float": torch.float32, "Double": torch.float64, "BFloat16": torch.bfloat16, "Half": torch.float16}


def clipped(case):
    params = []
    for numbers in case["gradients"]:
        gradient = torch.tensor(numbers, dtype=torch.float64).to(DTYPES[case["dtype"]])
        params.append(torch.zeros_like(gradient).requires_grad_())
        params[-1].grad = gradient
    norm_type = float(case["norm_type"])
    exact = torch.linalg.vector_norm(torch.cat([param.grad.double() for param in params]), norm_type)
    norm = torch.nn.utils.clip_grad_norm_(params, case["max_norm"], norm_type)
    gradients = [param.grad.tolist() for param in params]
    return {"norm": repr(norm.item()), "gradients": gradients, "exact": exact.item()}


torch.set_num_threads(1)
for case in json.load(sys.stdin):
    print(json.dumps(clipped(case)))
