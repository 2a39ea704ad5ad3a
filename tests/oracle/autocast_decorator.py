"""Calls a function that `torch.autocast` decorates, in each of the settings that it reads from stdin: twice outside of
all regions, and in one of fp16, where it was decorated there and where it was decorated outside. Prints the dtypes and
the numbers that it returns."""

import json
import sys

import torch

x = (torch.arange(16.0) * 0.37).sin().view(4, 4)


def decorated(settings):
    @torch.autocast("cpu", **settings)
    def forward(x):
        return x @ x

    return forward


def seen(forward, inside=False):
    product = forward(x)
    assert torch.is_autocast_enabled("cpu") == inside, "the region of the call is left open"
    return [str(product.dtype).removeprefix("torch."), product.float().flatten().tolist()]


def returned(settings):
    if "dtype" in settings:
        settings["dtype"] = getattr(torch, settings["dtype"])
    forward = decorated(settings)
    outcomes = [seen(forward), seen(forward)]
    with torch.autocast("cpu", dtype=torch.float16):
        return outcomes + [seen(decorated(settings), inside=True), seen(forward, inside=True)]


print(json.dumps([returned(settings) for settings in json.load(sys.stdin)]))
