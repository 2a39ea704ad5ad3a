"""The Python side of benches/masters.rs: answers a line for each line."""

import struct
import sys
from math import sqrt
from statistics import median
from time import perf_counter_ns

import torch

LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01


device = torch.device("cpu")  # of fused steps


def synchronize():
    if device.type == "cuda":
        torch.cuda.synchronize()


def values(parameter, numbers, factor):
    places = torch.arange(numbers)
    return ((places * 11 + parameter * factor).remainder(64) - 32 + 0.5) / 8


class Training:
    """bf16 parameters with f32 masters, and a scaler's part of the work, all by operations over lists."""

    def __init__(self, parameters, numbers):
        self.params = [values(i, numbers, 3).bfloat16() for i in range(parameters)]
        self.grads = [torch.zeros_like(p) for p in self.params]
        self.fresh = (values(1, numbers, 5) * 1024).bfloat16()
        self.masters = [p.float() for p in self.params]
        self.wide = [torch.empty_like(m) for m in self.masters]
        self.averages = [torch.zeros_like(m) for m in self.masters]
        self.squares = [torch.zeros_like(m) for m in self.masters]
        self.steps = 0
        self.scale = torch.tensor(1024.0)
        self.tracker = torch.tensor(0, dtype=torch.int32)
        self.found = torch.zeros(1)

    @torch.no_grad()
    def fill(self):
        for grad in reversed(self.grads):
            grad.copy_(self.fresh)

    @torch.no_grad()
    def step(self):
        self.found.zero_()
        torch._foreach_copy_(self.wide, self.grads)
        torch._amp_foreach_non_finite_check_and_unscale_(self.wide, self.found, self.scale.reciprocal())
        if not self.found.item():
            self.update()
            torch._foreach_copy_(self.params, self.masters)
        torch._amp_update_scale_(self.scale, self.tracker, self.found, 2.0, 0.5, 2000)

    def update(self):
        self.steps += 1
        first, second = 1 - BETA1**self.steps, 1 - BETA2**self.steps
        torch._foreach_mul_(self.masters, 1 - LR * DECAY)
        torch._foreach_lerp_(self.averages, self.wide, 1 - BETA1)
        torch._foreach_mul_(self.squares, BETA2)
        torch._foreach_addcmul_(self.squares, self.wide, self.wide, 1 - BETA2)
        roots = torch._foreach_sqrt(self.squares)
        torch._foreach_div_(roots, sqrt(second))
        torch._foreach_add_(roots, EPS)
        torch._foreach_addcdiv_(self.masters, self.averages, roots, -LR / first)

    def round(self, steps):
        times = []
        for _ in range(steps):
            self.fill()
            start = perf_counter_ns()
            self.step()
            times.append(perf_counter_ns() - start)
        return median(times)


def check(count):
    """The bits of bf16 parameters by PyTorch's fused AdamW over f32 masters; the lists must agree but for their rounding."""
    lists = Training(160, 16)
    masters = [m.clone() for m in lists.masters]
    optimizer = torch.optim.AdamW(masters, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, fused=True)
    for _ in range(count):
        lists.fill()
        for master in masters:
            master.grad = lists.fresh.float() / 1024
        optimizer.step()
        lists.step()
    torch.testing.assert_close(lists.masters, masters, rtol=1e-6, atol=1e-7)
    halves = torch.cat(masters).bfloat16().view(torch.int16).tolist()
    return "".join(struct.pack(">h", half).hex() for half in halves)


class Fused:
    """f32 parameters under PyTorch's fused AdamW."""

    def __init__(self, parameters, numbers):
        self.params = [values(i, numbers, 3).to(device).requires_grad_() for i in range(parameters)]
        self.fresh = values(1, numbers, 5).to(device)
        for param in self.params:
            param.grad = torch.empty_like(param)
        self.optimizer = torch.optim.AdamW(
            self.params, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, fused=True
        )

    def round(self, steps):
        times = []
        for _ in range(steps):
            for param in reversed(self.params):
                param.grad.copy_(self.fresh)
            synchronize()
            start = perf_counter_ns()
            self.optimizer.step()
            synchronize()
            times.append(perf_counter_ns() - start)
        return median(times)


TRAININGS = {}


def fused(parameters, numbers):
    key = "fused", parameters, numbers
    if key not in TRAININGS:
        TRAININGS.clear()
        TRAININGS[key] = Fused(parameters, numbers)
    return TRAININGS[key]


def answer(name, *args):
    global device
    args = [int(arg) for arg in args]
    if name == "cuda":
        device = torch.device("cuda", 0)
        return "done"
    if name == "check":
        return check(*args)
    if name == "threads":
        torch.set_num_threads(*args)
        return "done"
    if name == "fused":
        return fused(*args[:2]).round(args[2])
    if name == "fused_sum":
        training = Fused(*args[:2])
        training.round(args[2])
        return training.params[0].detach().view(torch.int32).sum().item()
    parameters, numbers, steps = args
    if (parameters, numbers) not in TRAININGS:
        TRAININGS.clear()
        TRAININGS[parameters, numbers] = Training(parameters, numbers)
    return TRAININGS[parameters, numbers].round(steps)


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(answer(*line.split()), flush=True)


main()
