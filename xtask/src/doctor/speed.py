"""Prints how fast the CPU is in half precision: matrix products by their size, and the operators that autocast casts to
bf16, forward and backward with the casts, as the time in f32 over the time in bf16.
"""

import time

try:
    import torch
    from torch.nn import functional as F
except ImportError:  # The tests need none.
    torch = F = None

WORTH = 1.5  # the gain of products from which a dtype is worth using, as in src/precision/choice.rs
SLOW = 0.06  # the most seconds of a product
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


def products(size, dtypes):
    """The seconds of a square product of one size by dtype, without those that take too long. The dtypes take turns, so
    that a moment in which the machine is busy with something else meets all of them.
    """
    matrices = {name: torch.ones(size, size, dtype=getattr(torch, name)) for name in dtypes}
    best, rounds, start = dict.fromkeys(dtypes, float("inf")), 0, time.perf_counter()
    while rounds < 2 or time.perf_counter() - start < 0.05 * len(best):
        for name, x in matrices.items():
            if rounds < 2 or best[name] <= SLOW:
                begin = time.perf_counter()
                x @ x
                best[name] = min(best[name], time.perf_counter() - begin)
        rounds += 1
    return {name: least for name, least in best.items() if least <= SLOW}


def times(ratio):
    return f"{ratio:.1f}x" if ratio >= 0.095 else f"{ratio:.2f}x"


def advice(name, ratios):
    """A sentence on a dtype whose products are so many times as fast as f32, by their size."""
    (small, least), (large, most) = ratios[0], ratios[-1]
    speeds = f"{name}: {times(most)} as fast as f32 at {large}"
    if len(ratios) > 1:
        speeds += f", {times(least)} at {small}"
    losing = [size for size, ratio in ratios if ratio < WORTH]
    if not losing:
        return f"{speeds}: use it for layers of every width."
    if losing[-1] == large:
        return f"{speeds}: do not use it here for its speed."
    return f"{speeds}: use it for layers wider than about {losing[-1]}."


def table(rows):
    """The ratios of each operator, None where bf16 took too long or failed, and what to do about those that lose."""
    head = ("f32 over bf16, forward and backward", "small", "medium", "large")
    shown = [(name, *("-" if x is None else f"{x:.2f}" for x in ratios)) for name, ratios in rows]
    lines = [f"{name:<42} {a:>7} {b:>7} {c:>7}" for name, a, b, c in (head, *shown)]
    slower = [name for name, ratios in rows if any(x is None or x < 1 for x in ratios)]
    slower = list(dict.fromkeys(name.split(",")[0].removesuffix(" of half") for name in slower))
    if not slower:
        return "\n".join([*lines, "None of them is slower in bf16."])
    return "\n".join([
        *lines,
        f"Slower in bf16 at one of the sizes: {', '.join(slower)}.",
        "`insight::Tuner` measures which of them a model should keep in f32, at which sizes, and whether attention",
        f'is faster when it is composed; `Autocast::keep_in_f32(["{slower[0]}"])` keeps one in f32 at all sizes.',
    ])


def main():
    print("Measured on the CPU, by matrix products:")
    found, dtypes = {}, ["float32", "bfloat16", "float16"]
    for size in (64, 128, 256, 512, 1024):
        found[size] = products(size, dtypes)
        # Larger ones of a dtype take even longer.
        dtypes = [name for name in dtypes if name in found[size]]
    for name, short in (("bfloat16", "bf16"), ("float16", "fp16")):
        both = [(size, best) for size, best in found.items() if name in best and "float32" in best]
        if both:
            print(advice(short, [(size, best["float32"] / best[name]) for size, best in both]))
    # What the first calls of a process prepare is not counted.
    for dtype in (torch.float32, torch.bfloat16):
        seconds(*OPERATORS["linear"](SIZES[0]), dtype)
    rows = []
    for name in OPERATORS:
        ratios = []
        for size in SIZES:
            ratios.append(None if None in ratios else ratio(name, size))
        rows.append((name, ratios))
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
