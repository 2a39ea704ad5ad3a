"""Reads the f32 numbers of an input of 5 x 8 and a weight of 8 x 3 as hexadecimal bytes, a line each.

Prints the gradients of both, in the same form, for a product that torch.utils.checkpoint recomputes in a bf16 region:
for each kind of checkpointing, with autocast switched off inside and as it is, after a backward outside and inside of
the region.
"""

import sys

import torch
from torch.utils.checkpoint import checkpoint

from bits import bits

torch.set_num_threads(1)
lines = [torch.frombuffer(bytearray.fromhex(line), dtype=torch.float32) for line in sys.stdin]


def gradients(reentrant, off_inside, backward_inside):
    x = lines[0].reshape(5, 8).clone().requires_grad_()
    w = lines[1].reshape(8, 3).clone().requires_grad_()

    def product(x):
        if not off_inside:
            return x @ w
        with torch.autocast("cpu", enabled=False):
            return x @ w

    region = torch.autocast("cpu", dtype=torch.bfloat16)
    with region:
        loss = checkpoint(product, x, use_reentrant=reentrant).float().square().sum()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return " ".join(bits(t.grad) for t in (x, w))


for reentrant in (True, False):
    for off_inside in (True, False):
        for backward_inside in (False, True):
            print(gradients(reentrant, off_inside, backward_inside))
