"""The Python side of benches/insight_tools.rs: for the name of a case, what each tool names."""

import contextlib
import io
import json
import re
import sys

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


def large_gradient(x, large):
    y = large(x * 1e-3)
    scaled = y.float() * 1e7
    return scaled - (scaled - y.float()).detach()


def excluded_logarithm(x, _):
    zero = x * 0
    return torch.where(zero <= 0, torch.zeros_like(zero), zero.log())


class Inner(nn.Module):
    def forward(self, x):
        return (x * 100).exp()


FP16, F32 = torch.float16, torch.float32

# The dtype of the region, the scale, and what is planted.
CASES = {
    "product of large activations": (FP16, 1, lambda x, _: (x * 300) @ (x * 300).T @ x),
    "linear layer with large weights": (FP16, 1, lambda x, large: large(x * 100)),
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
    "large gradient in fp16": (FP16, 1, large_gradient),
    "scale of 2^24": (FP16, 2.0**24, lambda x, large: large(x * 1e-3)),
    "recomputed exponential": (
        F32,
        1,
        lambda x, _: checkpoint(lambda x: (x * 100).exp(), x, use_reentrant=False),
    ),
    "part of a part": (F32, 1, None),
    "weight that is infinite": (F32, 1, lambda x, _: x),
    "NaN in the batch": (F32, 1, lambda x, _: x),
    "healthy attention mask": (F32, 1, lambda x, _: mask(x, 2).softmax(-1)),
}


class Planted(nn.Linear):
    """Its weights are large."""

    def __init__(self, planted):
        super().__init__(4, 4)
        self.planted = planted
        if planted is None:
            self.inner = Inner()

    def forward(self, x):
        return self.inner(x) if self.planted is None else self.planted(x, super().forward)


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
        return self.last(self.planted(self.first(x)).float())


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
    """The node that returned NaN."""
    with torch.autograd.detect_anomaly(check_nan=True), contextlib.redirect_stderr(io.StringIO()):
        try:
            step(name, Model(name))
        except RuntimeError as error:
            return re.search(r"Function '(\w+)' returned nan", str(error)).group(1)
    return None


def hooks(name):
    """The module after which the hooks stopped."""
    if transformers is None:
        return "not installed"
    model, printed = Model(name), io.StringIO()
    DebugUnderflowOverflow(model)
    with contextlib.redirect_stdout(printed):
        try:
            step(name, model)
        except ValueError:
            # Each module has a line with its name and its class.
            modules = re.findall(r"^ {17} ?(\S*) [A-Z]\w*$", printed.getvalue(), re.MULTILINE)
            return modules[-1] or "the model"
    return None


def answer(request):
    if request == "versions":
        other = "no transformers" if transformers is None else f"transformers {transformers.__version__}"
        return f"PyTorch {torch.__version__} and {other}"
    loss, gradient = finite(request)
    return json.dumps({"loss": loss, "gradient": gradient, "anomaly": anomaly(request), "hooks": hooks(request)})


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(answer(line.strip()), flush=True)


if __name__ == "__main__":
    main()
