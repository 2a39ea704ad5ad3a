"""Adam for fp16 parameters: a JSON program a line on stdin, a JSON line for each of its steps on stdout.

What is computed follows the documented behaviour of `AdamFP16` and `GradScalerFP16` of labml_nn: a copy of each
parameter and its moments are wide; gradients become wide before they are unscaled, in a table beside the parameters;
weight decay and the update act on the copy, and the parameter is the copy, rounded. A step with a gradient that is not
finite is skipped.

The arithmetic of the update is labml's ("labml": the bias corrections are in the step size, so that eps is added to a
root that is not corrected) or that of torch.optim over the copies ("single" and "fused"), and "wide" is f32 or f64.
Roots are rounded to nearest in each of them: what `Tensor.sqrt` is built on need not do that, a fused kernel does.

tests/steps/optim/adam_fp16.rs writes the programs.
"""

import json
import math
import sys

import torch

DTYPES = {"f32": torch.float32, "f64": torch.float64}


def rounded_root(tensor, root=torch.Tensor.sqrt):
    """By way of f64, whose digits are enough to round an f32 root twice without harm."""
    return root(tensor.double()).to(tensor.dtype)


torch.Tensor.sqrt = rounded_root


def told(tensor):
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()).hex()


def half(values):
    return torch.frombuffer(bytearray.fromhex(values), dtype=torch.float16).clone()


class LabmlUpdate:
    """Adam with plain operations, one copy at a time."""

    def __init__(self, copies, program):
        self.copies, self.program, self.steps = copies, program, 0
        self.moments = [(torch.zeros_like(copy), torch.zeros_like(copy)) for copy in copies]

    def step(self, grads):
        lr, (beta1, beta2), decay = (self.program[key] for key in ("lr", "betas", "weight_decay"))
        self.steps += 1
        correction1, correction2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        for copy, grad, (first, second) in zip(self.copies, grads, self.moments):
            if self.program["decoupled"]:
                copy.mul_(1.0 - lr * decay)
            else:
                grad = grad.add(copy, alpha=decay)
            first.mul_(beta1).add_(grad, alpha=1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            size = lr * math.sqrt(correction2) / correction1
            copy.addcdiv_(first, second.sqrt().add_(self.program["eps"]), value=-size)

    def state(self):
        return self.moments


class TorchUpdate:
    """PyTorch's own over the copies."""

    def __init__(self, copies, program):
        self.copies = copies
        kind = torch.optim.AdamW if program["decoupled"] else torch.optim.Adam
        options = {key: program[key] for key in ("lr", "betas", "eps", "weight_decay")}
        self.optimizer = kind(copies, fused=program["order"] == "fused", foreach=False, **options)

    def step(self, grads):
        for copy, grad in zip(self.copies, grads):
            copy.grad = grad
        self.optimizer.step()

    def state(self):
        states = (self.optimizer.state.get(copy, {}) for copy in self.copies)
        none = torch.zeros(0)
        return [(state.get("exp_avg", none), state.get("exp_avg_sq", none)) for state in states]


class Optimizer:
    """What the scaler sees: fp16 parameters, and a table of wide gradients that it fills."""

    def __init__(self, params, program):
        self.param_groups = [{"params": params}]
        self.wide = DTYPES[program["wide"]]
        self.copies = [param.detach().to(self.wide) for param in params]
        self.table = {}
        self.update = (LabmlUpdate if program["order"] == "labml" else TorchUpdate)(self.copies, program)

    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        self.update.step([self.table.pop(param) for param in params])
        for param, copy in zip(params, self.copies):
            param.copy_(copy)


class Scaler(torch.amp.GradScaler):
    """PyTorch's, with gradients that are unscaled in the optimizer's table."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        for param in optimizer.param_groups[0]["params"]:
            grad = param.grad.to(optimizer.wide)
            if not grad.isfinite().all():
                found_inf.fill_(1.0)
            optimizer.table[param] = grad.mul_(inv_scale)
        return {found_inf.device: found_inf}


def run(program):
    params = [half(values).requires_grad_() for values in program["params"]]
    optimizer = Optimizer(params, program)
    scaler = Scaler("cpu", init_scale=program["scale"])
    scaler.scale(torch.tensor(1.0))
    for grads in program["grads"]:
        for param, values in zip(params, grads):
            param.grad = half(values)
        scaler.step(optimizer)
        scaler.update()
        state = optimizer.update.state()
        yield {
            "param": [told(param) for param in params],
            "master_param": [told(copy) for copy in optimizer.copies],
            "exp_avg": [told(first) for first, _ in state],
            "exp_avg_sq": [told(second) for _, second in state],
            "scale": scaler.get_scale(),
        }


torch.set_num_threads(1)
for line in sys.stdin:
    for step in run(json.loads(line)):
        print(json.dumps(step))
