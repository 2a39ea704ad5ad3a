"""The Python side of benches/checkpoint.rs: answers a line for each line."""

import os
import pickle
import shutil
import sys
import tempfile
import warnings
from time import perf_counter_ns

import torch
from torch.amp import GradScaler

from resident import reset_peak, status


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

    def background(self, path):
        """Saves by DCP's thread. Returns for how long that has stopped the program, and when it was saved."""
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if not dist.is_initialized():
            warnings.filterwarnings("ignore")
            # Otherwise objects cannot be gathered without numpy.
            to_object = lambda tensor, size, group: pickle.loads(bytes(tensor.tolist()[:size]))
            dist.distributed_c10d._tensor_to_object = to_object
            store = dist.FileStore(tempfile.mktemp(), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            self.writer = dcp.FileSystemWriter(path)
            # On the CPU, with memory for the copy that is kept for the next save.
            options = StagingOptions(False, False, False, False)
            self.stager = DefaultStager(options)
        shutil.rmtree(path, ignore_errors=True)
        start = perf_counter_ns()
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        future = dcp.async_save(
            content, storage_writer=self.writer, checkpoint_id=path, async_stager=self.stager
        )
        stop = perf_counter_ns() - start
        future.result()
        return f"{stop} {perf_counter_ns() - start}"

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
    if name == "background":
        return training.background(path)
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
