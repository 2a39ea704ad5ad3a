"""Custom autograd functions as torch.autograd.Function with custom_fwd and custom_bwd: the twin of tests/regions/function/cases.rs.

Reads one JSON object a line, {"case": name, "inputs": [...]} with the inputs' bits, and answers one a line: the outputs
and the gradients of the inputs, as dtype, shape and bits, or null for a gradient that is not there.
"""

import json
import sys

import torch
from torch.amp import autocast, custom_bwd, custom_fwd

from bits import encode


def product(**options):
    """A matrix product whose forward is decorated with custom_fwd."""

    class MyMM(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", **options)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a.mm(b)

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad.mm(b.t()), a.t().mm(grad)

    return MyMM.apply


class Gelu(torch.autograd.Function):
    """x sigmoid(1.702 x), GELU's sigmoid approximation, with the output and an intermediate saved."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x):
        gate = torch.sigmoid(x * 1.702)
        out = x * gate
        ctx.save_for_backward(x, gate, out)
        return out

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, gate, out = ctx.saved_tensors
        return grad * (gate + out * (1 - gate) * 1.702)


class Sort(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values, index = x.sort(1)
        ranks = index.to(x.dtype)
        ctx.mark_non_differentiable(ranks)
        ctx.save_for_backward(index)
        return values, ranks

    @staticmethod
    def backward(ctx, grad, _):
        (index,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter_add(1, index, grad)


class Decay(torch.autograd.Function):
    """Multiplies its first input in place."""

    @staticmethod
    def forward(ctx, x, y):
        x.mul_(0.75)
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        return x, x + y

    @staticmethod
    def backward(ctx, grad, grad_sum):
        (y,) = ctx.saved_tensors
        return (grad + grad_sum) * 0.75 + 0 * y, grad_sum


class Swish(torch.autograd.Function):
    """Made of differentiable operations, so that it can be differentiated again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate * (1 + x * (1 - gate)))


class Split(torch.autograd.Function):
    """Without materialised gradients, and a missing gradient of its second input."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x * 2, y * 3

    @staticmethod
    def backward(ctx, first, second):
        assert first is None or second is None
        return None if first is None else first * 2, None if second is None else second * 3


def product_in_region(dtype, enabled, options):
    def run(inputs):
        with autocast("cpu", dtype=dtype, enabled=enabled):
            out = product(**options)(*inputs)
        out.float().square().sum().backward()
        return [out]

    return run


def penalty(inputs):
    (x,) = inputs
    out = Swish.apply(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (out.sum() + grad.square().sum()).backward()
    return [out, grad]


def penalty_product(inputs):
    out = product()(*inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    (out.sum() + sum(grad.square().sum() for grad in grads)).backward()
    return [out, *grads]


def gelu(inputs):
    with autocast("cpu", dtype=torch.bfloat16):
        out = Gelu.apply(inputs[0].mm(inputs[1]))
    out.float().sum().backward()
    return [out]


def sort(inputs):
    values, ranks = Sort.apply(inputs[0])
    assert values.requires_grad and not ranks.requires_grad
    (values * ranks).sum().backward()
    return [values, ranks]


def dirty(inputs):
    x, y = inputs
    x = x * 1.0
    first, second = Decay.apply(x, y)
    assert first is x
    (first.square().sum() + second.square().sum()).backward()
    return [first, second]


def split(inputs):
    first, second = Split.apply(*inputs)
    second.square().sum().backward()
    return [first, second]


CASES = {
    "penalty": penalty,
    "penalty_product": penalty_product,
    "gelu": gelu,
    "sort": sort,
    "dirty": dirty,
    "split": split,
}
for name, dtype in [("bf16", torch.bfloat16), ("fp16", torch.float16)]:
    for kind, options in [("", {}), ("_cast", {"cast_inputs": torch.float32})]:
        for place, enabled in [("", True), ("_outside", False)]:
            CASES[f"product{kind}{place}_{name}"] = product_in_region(dtype, enabled, options)


def decode(value):
    raw = bytearray.fromhex(value["bits"])
    return torch.frombuffer(raw, dtype=getattr(torch, value["kind"])).reshape(value["shape"]).clone().requires_grad_()


def encode_all(tensors):
    return [None if tensor is None else encode(tensor) for tensor in tensors]


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        inputs = [decode(value) for value in request["inputs"]]
        outputs = CASES[request["case"]](inputs)
        grads = [tensor.grad for tensor in inputs]
        print(json.dumps({"outputs": encode_all(outputs), "grads": encode_all(grads)}))


main()
