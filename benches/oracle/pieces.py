"""The Python side of benches/pieces.rs: answers a line for each line."""

import struct
import sys
from statistics import median
from time import perf_counter_ns

import torch
from torch.amp import GradScaler
from torch.optim.swa_utils import get_ema_multi_avg_fn

DECAY = 0.99


def values(parameter, width, factor):
    places = torch.arange(width * width)
    numbers = ((places * 11 + parameter * factor).remainder(64) - 32 + 0.5) / 8
    return numbers.view(width, width)


class Training:
    def __init__(self, piece, parameters, width):
        self.piece = piece
        self.params = [values(i, width, 3).requires_grad_() for i in range(parameters)]
        if piece == "muon":
            self.optimizer = torch.optim.Muon(self.params, lr=1e-3)
        elif piece == "nadam":
            self.optimizer = torch.optim.NAdam(self.params, lr=1e-3, foreach=False)
        elif piece == "adafactor":
            self.optimizer = torch.optim.Adafactor(self.params, lr=1e-3, foreach=False)
        else:
            self.optimizer = torch.optim.RMSprop(self.params, lr=1e-3, foreach=True)
        self.averages = None
        self.average = get_ema_multi_avg_fn(DECAY)
        fresh = values(1, width, 5)
        for param in self.params:
            (param * fresh).sum().backward()
        self.scaled = fresh * 65536.0
        self.loss = torch.tensor(1.0, requires_grad=True)
        self.scaler = GradScaler("cpu")

    def fill(self):
        with torch.no_grad():
            for param in reversed(self.params):
                param.grad.copy_(self.scaled)

    def step(self):
        self.scaler.scale(self.loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def advance(self):
        """As torch.optim.swa_utils.AveragedModel does: the first weights are copied."""
        with torch.no_grad():
            if self.averages is None:
                self.averages = [param.detach().clone() for param in self.params]
            else:
                self.average(self.averages, self.params, None)

    def round(self, steps):
        times = []
        for _ in range(steps):
            self.fill()
            start = perf_counter_ns()
            self.step()
            end = perf_counter_ns()
            if self.piece == "ema":
                start = perf_counter_ns()
                self.advance()
                end = perf_counter_ns()
            times.append(end - start)
        return median(times)

    def bits(self, steps):
        for _ in range(steps):
            self.fill()
            self.step()
            self.advance()
        tensors = self.averages if self.piece == "ema" else self.params
        numbers = torch.stack(list(tensors)).view(-1).tolist()
        return "".join(struct.pack(">f", number).hex() for number in numbers)


TRAININGS = {}


def answer(command, piece, *args):
    parameters, width, steps = (int(arg) for arg in args)
    if command == "check":
        return Training(piece, parameters, width).bits(steps)
    key = (piece, parameters, width)
    if key not in TRAININGS:
        TRAININGS.clear()
        TRAININGS[key] = Training(*key)
    return TRAININGS[key].round(steps)


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(answer(*line.split()), flush=True)


main()
