"""The Python side of benches/insight_tools.rs: for the name of a case, what each tool names."""

import contextlib
import io
import json
import re
import sys
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

try:
    import transformers
    from transformers.debug_utils import DebugUnderflowOverflow
except ImportError:
    transformers = None


def mask(x, count):
    return x.masked_fill(torch.arange(4) < count, float("-inf"))


def attention(x, _):
    q = (x * 300).view(1, 2, 4)
    return torch.bmm(torch.bmm(q, q.transpose(1, 2)).softmax(-1), x.view(1, 2, 4)).view(2, 4)


def large_gradient(x, part):
    y = part.large(x * 1e-3)
    scaled = y.float() * 1e7
    return scaled - (scaled - y.float()).detach()


def excluded_logarithm(x, _):
    zero = x * 0
    return torch.where(zero <= 0, torch.zeros_like(zero), zero.log())


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 100).exp()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad / (y * 2)


class Inner(nn.Module):
    """A part of a part, which may have a mask."""

    def forward(self, x, mask=None):
        return (x * 100).exp() if mask is None else (x + mask).softmax(-1)


FP16, F32 = torch.float16, torch.float32

# The dtype of the region, the scale, and what is planted, given the module that it is in.
CASES = {
    "product of large activations": (FP16, 1, lambda x, _: (x * 300) @ (x * 300).T @ x),
    "linear layer with large weights": (FP16, 1, lambda x, part: part.large(x * 100)),
    "attention scores in fp16": (FP16, 1, attention),
    "exponential in fp16": (FP16, 1, lambda x, _: (x * 20).half().exp()),
    "square in fp16": (FP16, 1, lambda x, _: (x * 300).half().pow(2)),
    "long sum in fp16": (FP16, 1, lambda x, _: (x * 2000).half().expand(100, 2, 4).sum(0)),
    "convolution in fp16": (
        FP16,
        1,
        lambda x, _: nn.functional.conv2d((x * 300).view(1, 1, 2, 4), torch.full((1, 1, 1, 1), 300.0)).view(2, 4),
    ),
    "logarithm of negative numbers": (F32, 1, lambda x, _: (x * -1).log()),
    "division by zero": (F32, 1, lambda x, _: x / torch.zeros_like(x)),
    "layer norm without variance": (F32, 1, lambda x, _: nn.functional.layer_norm(x * 0, [4], eps=0.0)),
    "softmax of a masked row": (F32, 1, lambda x, _: mask(x, 4).softmax(-1)),
    "square root at zero": (F32, 1, lambda x, _: (x * 0).sqrt()),
    "arc cosine at one": (F32, 1, lambda x, _: (x * 0 + 1).acos()),
    "logarithm that `where` excludes": (F32, 1, excluded_logarithm),
    "norm of zeros by hand": (F32, 1, lambda x, _: x + (x * 0).square().sum(-1, keepdim=True).sqrt()),
    "large gradient in fp16": (FP16, 1, large_gradient),
    "scale of 2^24": (FP16, 2.0**24, lambda x, part: part.large(x * 1e-3)),
    "recomputed exponential": (
        F32,
        1,
        lambda x, _: checkpoint(lambda x: (x * 100).exp(), x, use_reentrant=False),
    ),
    "custom function": (F32, 1, lambda x, _: Exponential.apply(x)),
    "derivative of a custom function": (F32, 1, lambda x, _: Root.apply(x * 0)),
    "part of a part": (F32, 1, lambda x, part: part.inner(x)),
    "weight that is infinite": (F32, 1, lambda x, _: x),
    "NaN in the batch": (F32, 1, lambda x, _: x),
    "healthy attention mask": (F32, 1, lambda x, _: mask(x, 2).softmax(-1)),
    "healthy mask as an input of a part": (F32, 1, lambda x, part: part.inner(x, mask(torch.zeros_like(x), 2))),
}


class Planted(nn.Linear):
    """Its weights are large."""

    def __init__(self, body):
        super().__init__(4, 4)
        self.body, self.inner = body, Inner()

    def large(self, x):
        return super().forward(x)

    def forward(self, x):
        return self.body(x, self)


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.first, self.planted, self.last = nn.Linear(4, 4), Planted(CASES[name][2]), nn.Linear(4, 4)
        with torch.no_grad():
            for layer, size in ((self.first, 1), (self.planted, 1e3), (self.last, 1)):
                layer.weight.copy_(torch.eye(4) * size)
                layer.bias.zero_()
            if name == "weight that is infinite":
                self.last.weight.fill_(float("inf"))

    def forward(self, x):
        # A line for each, so that a traceback names one of them.
        x = self.first(x)
        x = self.planted(x)
        x = x.float()
        return self.last(x)


def step(name, model):
    dtype, scale, _ = CASES[name]
    x = torch.arange(8.0).reshape(2, 4) / 8 + 0.5
    if name == "NaN in the batch":
        x = x * float("nan")
    with torch.autocast("cpu", dtype=FP16, enabled=dtype == FP16):
        loss = model(x).float().square().mean()
    (loss * scale).backward()
    return loss


def finite(name):
    model = Model(name)
    loss = step(name, model)
    return bool(loss.isfinite()), bool(model.first.weight.grad.isfinite().all())


def anomaly(name):
    """The node that returned NaN, and the part that the traceback of its forward operator leads to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                step(name, Model(name))
        except RuntimeError as error:
            return named_node(str(error), [str(warning.message) for warning in caught])
    return None


def named_node(error, warned):
    node = re.search(r"Function '(\w+)' returned nan", error).group(1)
    traceback = next((text for text in warned if "Traceback of forward call" in text), None)
    return {"node": node, "part": None if traceback is None else part_of(traceback)}


def part_of(traceback):
    """The modules that the lines of a traceback call, from the outermost to the innermost."""
    return ".".join(re.findall(r"\b(?:self|part)\.(first|planted|inner|last)\(", traceback)) or "the loss"


def hooks(name):
    """The module after which the hooks stopped, and the first line about it with inf or nan."""
    if transformers is None:
        return None
    model, printed = Model(name), io.StringIO()
    DebugUnderflowOverflow(model)
    with contextlib.redirect_stdout(printed):
        try:
            step(name, model)
        except ValueError:
            return named_module(printed.getvalue())
    return None


def named_module(report):
    # Each module has a line with its name and its class, and then one for each weight, input and output.
    _, module, lines = re.split(r"^ {17} (\S*) [A-Z]\w*$", report, flags=re.MULTILINE)[-3:]
    largest = re.findall(r"^ *\S+ +(\S+) (\S+)$", lines, re.MULTILINE)
    return {"module": module, "line": next(line for number, line in largest if number in ("inf", "nan"))}


def answer(request):
    if request == "versions":
        return json.dumps({"torch": torch.__version__, "transformers": transformers and transformers.__version__})
    loss, gradient = finite(request)
    return json.dumps({"loss": loss, "gradient": gradient, "anomaly": anomaly(request), "hooks": hooks(request)})


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(answer(line.strip()), flush=True)


if __name__ == "__main__":
    main()
