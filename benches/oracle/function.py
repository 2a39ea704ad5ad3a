"""The Python side of benches/function.rs: answers a line for each line."""

import struct
import sys
import time

import torch
from torch.amp import custom_bwd, custom_fwd


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad * factor, None


class AmpScale(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad * factor, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * b, grad * a


APPLY = {
    "scale": Scale.apply,
    "amp_scale": AmpScale.apply,
    "product": Product.apply,
    "builtin": lambda a, b: a * b,
}


def inputs(name):
    both = name == "product"
    return torch.tensor([1.25], requires_grad=True), torch.tensor([-0.3], requires_grad=both)


def once(name):
    a, b = inputs(name)
    out = APPLY[name](a, b)
    out.backward()
    values = [out.item(), a.grad.item(), 0.0 if b.grad is None else b.grad.item()]
    return " ".join(struct.pack(">d", value).hex() for value in values)


def timed(count, call):
    """The time of one call, after some that warm the processor up."""
    for _ in range(count // 2):
        call()
    start = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - start) / count


def both(count, name):
    """Forward and backward, with fresh leaves each time: their gradients are stored, not added."""
    apply = APPLY[name]
    a, b = inputs(name)
    two = b.requires_grad

    def call():
        nonlocal a, b
        apply(a, b).backward()
        a = a.detach().requires_grad_()
        if two:
            b = b.detach().requires_grad_()

    return timed(count, call)


def forward(count, name):
    apply = APPLY[name]
    a, b = inputs(name)
    return timed(count, lambda: apply(a, b))


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, *args = line.split()
        if name == "values":
            answer = ";".join(once(name) for name in args)
        else:
            answer = {"both": both, "forward": forward}[name](int(args[1]), args[0])
        print(answer, flush=True)


main()
