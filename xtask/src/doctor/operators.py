"""Prints a line for each operator: its name, and at a small, a medium and a large size the time in f32 over the time in
bf16, forward and backward with the casts that autocast makes, or - if it takes too long or fails.
"""

import time

import torch
from torch.nn import functional as F

FIRST, WORST = 2.0, 0.15  # the most seconds of the first call, and of another
LEAST, SHARE = 5, 0.1  # the least calls in each dtype, and seconds for all of them


def parameters(*sizes):
    return [torch.randn(size, requires_grad=True) for size in sizes]


def lstm(width):
    model = torch.nn.LSTM(width, width)
    return lambda x: model(x)[0], parameters((32, 16, width))


def of(f, *sizes):
    return f, parameters(*sizes)


def embedding(rows):
    places = torch.randint(1024, (rows,))
    return of(lambda table: F.embedding(places, table), (1024, 256))


def attention(length, causal=False, mask=False):
    allowed = torch.ones(length, length).tril().bool() if mask else None
    call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal)
    return of(call, *[(4, 4, length, 64)] * 3)


# Autocast's list of half precision on the CPU, and then what reads its results.
OPERATORS = {
    "linear": lambda n: of(F.linear, (4 * n, 16 * n), (16 * n, 16 * n), (16 * n,)),
    "matmul": lambda n: of(torch.matmul, (16 * n, 16 * n), (16 * n, 16 * n)),
    "bmm": lambda n: of(torch.bmm, (8, 8 * n, 8 * n), (8, 8 * n, 8 * n)),
    "baddbmm": lambda n: of(torch.baddbmm, (8, 8 * n, 8 * n), (8, 8 * n, 8 * n), (8, 8 * n, 8 * n)),
    "conv1d": lambda n: of(F.conv1d, (4, 8 * n, 64), (8 * n, 8 * n, 3)),
    "conv2d": lambda n: of(F.conv2d, (2, 8 * n, 16, 16), (8 * n, 8 * n, 3, 3)),
    "conv3d": lambda n: of(F.conv3d, (1, 4 * n, 8, 8, 8), (4 * n, 4 * n, 3, 3, 3)),
    "conv_transpose2d": lambda n: of(F.conv_transpose2d, (2, 8 * n, 8, 8), (8 * n, 8 * n, 3, 3)),
    "lstm": lambda n: lstm(16 * n),
    "prelu": lambda n: of(F.prelu, (64 * n, 64 * n), (64 * n,)),
    "scaled_dot_product_attention": lambda n: attention(32 * n),
    "scaled_dot_product_attention, causal": lambda n: attention(32 * n, causal=True),
    "scaled_dot_product_attention, with a mask": lambda n: attention(32 * n, mask=True),
    "gelu of half": lambda n: of(F.gelu, (64 * n, 64 * n)),
    "layer_norm of half": lambda n: of(lambda x: F.layer_norm(x, (x.size(-1),)), (64 * n, 64 * n)),
    "softmax of half": lambda n: of(lambda x: x.softmax(-1), (64 * n, 64 * n)),
    "max_pool2d of half": lambda n: of(lambda x: F.max_pool2d(x, 2), (2, 8 * n, 32, 32)),
    "interpolate of half": lambda n: of(lambda x: F.interpolate(x, scale_factor=2), (2, 8 * n, 16, 16)),
    "embedding of half": lambda n: embedding(64 * n),
}
SIZES = (2, 8, 16)


def seconds(call, inputs, dtype):
    """The time of a call with its backward pass."""
    begin = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32, cache_enabled=False):
        result = call(*inputs)
    result.backward(torch.ones_like(result))
    return time.perf_counter() - begin


def ratio(name, size):
    """The least time in f32 over the least in bf16, in turns, after a call of each that is not counted; None if a call
    takes too long or fails, as an LSTM does where there are no instructions for bf16.
    """
    call, inputs = OPERATORS[name](size)
    kinds = {torch.float32: inputs, torch.bfloat16: inputs}
    if name.endswith(" of half"):
        kinds = {dtype: [x.detach().to(dtype).requires_grad_() for x in inputs] for dtype in kinds}
    best, calls, start = {dtype: float("inf") for dtype in kinds}, 0, time.perf_counter()
    try:
        while calls <= LEAST or time.perf_counter() - start < SHARE:
            for dtype, these in kinds.items():
                last = seconds(call, these, dtype)
                if calls > 0:
                    best[dtype] = min(best[dtype], last)
                if last > (WORST if calls > 0 else FIRST):
                    return None
            calls += 1
    except RuntimeError:
        return None
    return best[torch.float32] / best[torch.bfloat16]


# What the first calls of a process prepare is not counted.
for dtype in (torch.float32, torch.bfloat16):
    seconds(*OPERATORS["linear"](SIZES[0]), dtype)
for name in OPERATORS:
    ratios = []
    for size in SIZES:
        ratios.append(None if None in ratios else ratio(name, size))
    print(name, *("-" if measured is None else f"{measured:.2f}" for measured in ratios), sep="\t")
