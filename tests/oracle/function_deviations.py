"""Asserts PyTorch's side of the differences that docs/differences.md lists for custom functions."""

import torch
from torch.amp import autocast, custom_bwd, custom_fwd
from torch.autograd import grad
from torch.autograd.function import once_differentiable


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Needs(Double):
    @staticmethod
    def forward(ctx, x):
        Needs.seen = ctx.needs_input_grad
        return x * 2


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 * x


class Cast(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 * x


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y

    @staticmethod
    def backward(ctx, a, b):
        Twice.seen = (a.item(), b.item())
        return a * 2 + b * 2


class Integer(Double):
    @staticmethod
    def backward(ctx, g):
        return (g * 2).long()


class State(Double):
    @staticmethod
    def backward(ctx, g):
        State.seen = torch.is_autocast_enabled("cpu")
        return g * 2


def main():
    x = torch.tensor([3.0], requires_grad=True)
    with torch.no_grad():
        Needs.apply(x)
    assert Needs.seen == (True,), "needs_input_grad under no_grad"

    (first,) = grad(Once.apply(x).sum(), x, create_graph=True)
    assert not first.requires_grad, "once_differentiable without a gradient that requires one"
    (second,) = grad((first + x**2).sum(), x)
    assert second.item() == 6, "the term of the first gradient is missing, silently"

    half = torch.tensor([3.0], dtype=torch.bfloat16, requires_grad=True)
    with autocast("cpu"):
        out = Cast.apply(half)
    (first,) = grad(out.sum(), half, create_graph=True)
    assert not first.requires_grad, "cast_inputs and a second derivative"

    a, b = Twice.apply(x)
    assert a is b
    (a * 2 + b * 3).backward()
    assert Twice.seen == (0, 5), "one tensor returned twice"

    x.grad = None
    Integer.apply(x).backward()
    assert x.grad.item() == 2, "an integer gradient"

    with autocast("cpu"):
        out = State.apply(x)
    out.backward()
    assert not State.seen, "the state of a backward without custom_bwd"
    print("ok")


main()
