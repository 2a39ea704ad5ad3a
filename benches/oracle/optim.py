"""The Python side of benches/optim.rs: answers a line for each line."""

import struct
import sys
from statistics import median
from time import perf_counter_ns

import torch
from torch.amp import GradScaler

MAX_NORM = 1.0


def values(parameter, numbers, factor):
    places = torch.arange(numbers)
    return ((places * 11 + parameter * factor).remainder(64) - 32 + 0.5) / 8


class Training:
    def __init__(self, parameters, numbers):
        self.params = [values(i, numbers, 3).requires_grad_() for i in range(parameters)]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-3, fused=True)
        fresh = values(1, numbers, 5)
        for param in self.params:
            (param * fresh).sum().backward()
        self.scaled = fresh * 65536.0
        self.loss = torch.tensor(1.0, requires_grad=True)
        self.scaler = GradScaler("cpu")
        self.scaler.scale(self.loss)

    def fill(self):
        """Fresh gradients, the last parameter's first, as backward makes them."""
        with torch.no_grad():
            for param in reversed(self.params):
                param.grad.copy_(self.scaled)

    def round(self, steps, clip):
        scaler, optimizer, loss, params = self.scaler, self.optimizer, self.loss, self.params
        times = []
        for _ in range(steps):
            self.fill()
            start = perf_counter_ns()
            scaler.scale(loss)
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            times.append(perf_counter_ns() - start)
        return median(times)

    def check(self, count, overflow):
        for step in range(count):
            self.fill()
            if step == overflow:
                self.params[3].grad[5] = float("inf")
            self.scaler.step(self.optimizer)
            self.scaler.update()
        values = [self.scaler.get_scale(), *torch.cat(self.params).tolist()]
        return "".join(struct.pack(">f", value).hex() for value in values)


TRAININGS = {}


def training(*key):
    if key not in TRAININGS:
        for other in [other for other in TRAININGS if other[:2] != key[:2]]:
            del TRAININGS[other]
        TRAININGS[key] = Training(*key[:2])
    return TRAININGS[key]


def answer(name, *args):
    args = [int(arg) for arg in args]
    if name == "check":
        return Training(160, 16).check(*args)
    if name == "threads":
        torch.set_num_threads(*args)
        return "done"
    parameters, numbers, steps = args
    plain = training(parameters, numbers, False).round(steps, False)
    clipped = training(parameters, numbers, True).round(steps, True)
    return f"{plain} {clipped} {clipped}"


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(answer(*line.split()), flush=True)


main()
