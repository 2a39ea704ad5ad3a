"""The Python side of benches/gpu.rs: answers a line for each line.

`model NAME FILE` makes a model and saves its weights; `losses NAME PRECISION ITERATIONS` answers with the losses, from
the saved weights; `run NAME PRECISION ITERATIONS` trains and answers with the nanoseconds of an iteration, the
nanoseconds for which the host was busy with it, and the peak of the allocated memory in bytes.
"""

import sys
from time import perf_counter_ns

import torch

from training import MODELS

DEVICE = torch.device("cuda", 0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "clip": torch.float16}
MAX_NORM = 1.0


class Training:
    def __init__(self, name, weights, precision):
        self.precision, self.dtype = precision, DTYPES.get(precision)
        self.model = MODELS[name]()
        self.model.load_state_dict(weights)
        self.model.to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.dtype == torch.float16)
        torch.manual_seed(1)
        self.data = [tensor.to(DEVICE) for tensor in self.model.batch()]

    def iterate(self):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", self.dtype, enabled=self.dtype is not None):
            loss = self.model.loss(*self.data)
        self.scaler.scale(loss).backward()
        if self.precision == "clip":
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def run(self, iterations):
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = perf_counter_ns()
        for _ in range(iterations):
            self.iterate()
        host = perf_counter_ns()
        torch.cuda.synchronize()
        end = perf_counter_ns()
        return (end - start) / iterations, (host - start) / iterations, torch.cuda.max_memory_allocated()


def losses(training, iterations):
    return " ".join(str(training.iterate().item()) for _ in range(iterations))


def main():
    weights, running = None, {}
    for line in sys.stdin:
        command, name, *rest = line.split()
        if command == "model":
            torch.manual_seed(0)
            running.clear()
            torch.cuda.empty_cache()
            weights = MODELS[name]().state_dict()
            torch.save({"model": weights}, rest[0])
            answer = "saved"
        elif command == "losses":
            answer = losses(Training(name, weights, rest[0]), int(rest[1]))
        else:
            precision = rest[0]
            if precision not in running:
                # One at a time, so that the peak of the memory is that of one training.
                running.clear()
                running[precision] = Training(name, weights, precision)
                running[precision].run(3)
            answer = " ".join(map(str, running[precision].run(int(rest[1]))))
        print(answer, flush=True)


if __name__ == "__main__":
    main()
