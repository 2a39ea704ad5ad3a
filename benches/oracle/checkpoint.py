"""The Python side of benches/checkpoint.rs: answers a line for each line."""

import os
import sys
from time import perf_counter_ns

import torch
from torch.amp import GradScaler


def status(field):
    """A field of /proc/self/status in bytes, or -1."""
    try:
        with open("/proc/self/status") as lines:
            found = [line.split() for line in lines if line.startswith(f"{field}:")]
            return int(found[0][1]) * 1024
    except (OSError, IndexError):
        return -1


def reset_peak():
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


class Training:
    def __init__(self, parameters, numbers):
        names = [f"w{i:03}" for i in range(parameters)]
        weights = {name: torch.nn.Parameter(torch.zeros(numbers)) for name in names}
        self.model = torch.nn.ParameterDict(weights)
        self.fresh()

    def fresh(self):
        """What a resumed program has: an optimizer and a scaler without a past."""
        parameters = self.model.named_parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        self.scaler = GradScaler("cpu")
        self.scaler.scale(torch.tensor(1.0))

    def save(self, path):
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        temporary = f"{path}.tmp"
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def load(self, path):
        content = torch.load(path, weights_only=True)
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.scaler.load_state_dict(content["scaler"])

    def sums(self):
        """For each parameter the sums of the bits of it and of its state, and at the end the scale."""
        tensors = []
        for parameter in self.model.values():
            state = self.optimizer.state[parameter]
            tensors += [parameter, state["exp_avg"], state["exp_avg_sq"], state["step"]]
        bits = [tensor.detach().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors]
        return " ".join(str(bit.item()) for bit in bits) + f" {self.scaler.get_scale()}"


def timed(work):
    """Nanoseconds, and the bytes at the peak above those before."""
    reset_peak()
    before = status("VmRSS")
    start = perf_counter_ns()
    work()
    time = perf_counter_ns() - start
    return f"{time} {status('VmHWM') - before}"


def warm(path):
    """Reads a file, so that the page cache has it: what was written since may have driven it out."""
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass


def answer(training, name, path=None):
    if name == "save":
        return timed(lambda: training.save(path))
    if name == "load":
        training.fresh()
        warm(path)
        return timed(lambda: training.load(path))
    return training.sums()


def main():
    torch.set_num_threads(1)
    parameters, numbers = map(int, sys.stdin.readline().split())
    training = Training(parameters, numbers)
    print("ready", flush=True)
    for line in sys.stdin:
        print(answer(training, *line.rstrip("\n").split(" ", 1)), flush=True)


main()
