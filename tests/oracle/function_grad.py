"""torch.autograd.grad: the counterpart of the cases in tests/regions/function/grad.rs.

Prints one JSON object: for each case the gradients, as their bits, null for a missing one, or "error".
"""

import json

import torch
from torch.amp import autocast
from torch.autograd import grad


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x * 2


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("it is told to")


def leaf():
    return torch.tensor([0.3, -1.25, 2.7], requires_grad=True)


def given(values, dtype=torch.float32):
    return torch.tensor(values).to(dtype)


def matrices():
    a = torch.tensor([0.3, -1.25, 2.7, 0.9]).view(2, 2).requires_grad_()
    b = torch.tensor([1.1, 0.2, -0.7, 3.3]).view(2, 2).requires_grad_()
    return a, b


def second(y, xs, **options):
    """The second derivatives, by way of the sum of the squares of the first ones."""
    first = grad(y, xs, create_graph=True, **options)
    return [*first, *grad(sum(g.square().sum() for g in first), xs)]


def twice(y, xs, first, again):
    return [*grad(y, xs, **first), *grad(y, xs, **again)]


def complex_output(x):
    return (x.to(torch.complex64) * 2j).sum()


def product_in_a_region():
    a, b = matrices()
    with autocast("cpu"):
        loss = (a @ b).float().square().sum()
    return grad(loss, (a, b))


def call_in_a_region():
    a, b = matrices()
    loss = (a @ b).square().sum()
    with autocast("cpu"):
        return grad(loss, (a, b))


def second_in_a_region():
    a, b = matrices()
    with autocast("cpu"):
        return second((a @ b).float().square().sum(), (a, b))


def under_no_grad():
    x = leaf()
    y = x.exp().sum()
    with torch.no_grad():
        return grad(y, x)


def siblings(**options):
    a, b, _ = leaf().unbind()
    return grad(a * 2, b, **options)


V = [1.5, -2.0, 0.25]


def cases():
    yield "a sum", lambda x: grad(x.sin().sum(), x)
    yield "given", lambda x: grad([x.exp()], [x], [given(V)])
    yield "given in f64", lambda x: grad([x.exp()], [x], [given(V, torch.float64)])
    yield "given as bf16", lambda x: grad([x.exp()], [x], [given(V, torch.bfloat16)])
    yield "given as integers", lambda x: grad([x.exp()], [x], [given([1, 2, 3])])
    yield "given as booleans", lambda x: grad([x.exp()], [x], [given([1, 0, 1], torch.bool)])
    yield "two outputs, one given", lambda x: grad([x.exp(), x.sum()], [x], [given(V), None])
    yield "one element in two dimensions", lambda x: grad(x.exp().sum().view(1, 1), x)
    yield "one output twice", lambda x: (lambda y: grad([y, y], x))(x.exp().sum())
    yield "one input twice", lambda x: grad(x.exp().sum(), [x, x])
    yield "an output that is the input", lambda x: grad([x], [x], [given(V)])
    yield "an intermediate input", lambda x: (lambda m: grad(m.sin().sum(), [m, x]))(x.exp())
    yield "no elements", lambda x: grad([x[:0]], [x], [given([])])
    yield "a complex output, given", lambda x: grad([complex_output(x)], [x], [torch.tensor(0.5 - 1j)])
    yield "a graph that is kept", lambda x: twice(x.exp().sum(), x, {"retain_graph": True}, {})
    yield "a graph that create_graph keeps", lambda x: twice(x.exp().sum(), x, {"create_graph": True}, {})
    yield "second derivatives", lambda x: second(x.exp().sum(), [x])
    yield "second derivatives of a custom function", lambda x: second(Square.apply(x).exp().sum(), [x])
    yield "an unused input, allowed", lambda x: grad(x.exp().sum(), [x, leaf()], allow_unused=True)
    yield "a sibling, allowed", lambda _: siblings(allow_unused=True)
    yield "a product in a region", lambda _: product_in_a_region()
    yield "a call in a region", lambda _: call_in_a_region()
    yield "second derivatives in a region", lambda _: second_in_a_region()
    yield "under no_grad", lambda _: under_no_grad()

    yield "no graph", lambda x: grad(torch.ones(()), x)
    yield "no graph, given", lambda x: grad([torch.ones(3)], [x], [given(V)])
    yield "a second output without a graph", lambda x: grad([x.sum(), torch.ones(())], x)
    yield "integers", lambda x: grad(x.argmax(), x)
    yield "several elements", lambda x: grad(x.exp(), x)
    yield "several elements and None", lambda x: grad([x.exp(), x.sum()], [x], [None, None])
    yield "no elements and None", lambda x: grad(x[:0], x)
    yield "a complex output", lambda x: grad(complex_output(x), x)
    yield "another shape", lambda x: grad([x.exp()], [x], [given([1.0])])
    yield "a shape that could be broadcast", lambda x: grad([x.sum()], [x], [given([1.0])])
    yield "a complex gradient of a real output", lambda x: grad([x.exp()], [x], [given(V, torch.complex64)])
    yield "a real gradient of a complex output", lambda x: grad([complex_output(x)], [x], [torch.tensor(1.0)])
    yield "fewer gradients than outputs", lambda x: grad([x.sum(), x.sum()], [x], [torch.tensor(1.0)])
    yield "an unused input", lambda x: grad(x.exp().sum(), [x, leaf()])
    yield "a sibling", lambda _: siblings()
    yield "an input that requires none", lambda x: grad(x.sum(), [torch.ones(3)])
    yield "an input that requires none, allowed", lambda x: grad(x.sum(), [torch.ones(3)], allow_unused=True)
    yield "no inputs", lambda x: grad(x.sum(), [])
    yield "no outputs", lambda x: grad([], [x])
    yield "a freed graph", lambda x: twice(x.exp().sum(), x, {}, {})
    yield "a graph that is not kept", lambda x: twice(
        x.exp().sum(), x, {"create_graph": True, "retain_graph": False}, {}
    )
    yield "a backward that fails", lambda x: grad(Fails.apply(x).sum(), x)


def bits(t):
    return None if t is None else t.detach().contiguous().view(torch.uint8).flatten().tolist()


def answer(case):
    try:
        return [bits(t) for t in case(leaf())]
    # Up to torch 2.11, some are of this type.
    except (RuntimeError, ValueError):
        return "error"


def deviations():
    """What docs/differences.md says of PyTorch."""
    x, unused = leaf(), leaf()
    y = x.exp().sum()
    assert len(grad([y], [x], [torch.tensor(1.0), torch.tensor(2.0)], retain_graph=True)) == 1
    assert grad([], [x], allow_unused=True) == (None,)
    for inputs in [[x, unused], [x]]:
        try:
            grad(y, inputs)
            raise AssertionError("the graph is free after a call that failed")
        except RuntimeError:
            pass


torch.set_num_threads(1)
deviations()
print(json.dumps({name: answer(case) for name, case in cases()}))
