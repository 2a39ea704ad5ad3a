"""The Python side of benches/scaler.rs: answers a line for each line."""

import struct
import sys
from statistics import median
from time import perf_counter_ns

import torch
from torch.amp import GradScaler

PARAMETERS, NUMBERS = 160, 16


def numbers(parameter, factor):
    return torch.tensor([((parameter * factor + j * 11) % 64 - 32) / 8 for j in range(NUMBERS)])


class Training:
    def __init__(self):
        self.params = [numbers(i, 3).requires_grad_() for i in range(PARAMETERS)]
        self.optimizer = torch.optim.SGD(self.params, lr=1e-3)
        self.fresh = [numbers(i, 5) for i in range(PARAMETERS)]
        self.scaled = [grad * 65536.0 for grad in self.fresh]
        sum((param * grad).sum() for param, grad in zip(self.params, self.fresh)).backward()
        self.loss = torch.tensor(1.0, requires_grad=True)
        self.scaler = GradScaler("cpu")
        self.scaler.scale(self.loss)

    def fill(self, values):
        with torch.no_grad():
            for param, value in zip(self.params, values):
                param.grad.copy_(value)

    def round(self, count):
        scaler, optimizer, loss = self.scaler, self.optimizer, self.loss
        iterations = []
        for _ in range(count):
            self.fill(self.fresh)
            a = perf_counter_ns()
            optimizer.step()
            b = perf_counter_ns()
            plain = b - a
            self.fill(self.scaled)
            a = perf_counter_ns()
            scaler.scale(loss)
            b = perf_counter_ns()
            scaler.unscale_(optimizer)
            c = perf_counter_ns()
            scaler.step(optimizer)
            d = perf_counter_ns()
            scaler.update()
            e = perf_counter_ns()
            iterations.append((plain, e - a, e - a - plain, b - a, c - b, d - c - plain, e - d))
        return " ".join(str(median(times)) for times in zip(*iterations))

    def check(self, count, overflow):
        for iteration in range(count):
            self.fill(self.scaled)
            if iteration == overflow:
                self.params[3].grad[5] = float("inf")
            if iteration % 2 == 1:
                self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        values = [self.scaler.get_scale(), *torch.cat(self.params).tolist()]
        return "".join(struct.pack(">f", value).hex() for value in values)


def main():
    torch.set_num_threads(1)
    training = Training()
    for line in sys.stdin:
        name, *args = line.split()
        args = [int(arg) for arg in args]
        print(Training().check(*args) if name == "check" else training.round(*args), flush=True)


main()
