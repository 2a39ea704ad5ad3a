"""Trains with torch.optim and fused=True: a JSON program a line on stdin, a line of bits for each of its steps on stdout.

tests/optim_programs.rs writes the programs.
"""

import json
import sys

import torch

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
KEYS = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
CLASSES = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "Sgd": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}


def bits(tensor):
    plain = tensor.detach().contiguous()
    return bytes(plain.view(-1).view(torch.uint8).tolist()).hex()


def tensor(spec, values):
    dtype = DTYPES[spec["dtype"]]
    if not values:
        return torch.empty(spec["shape"], dtype=dtype)
    plain = torch.frombuffer(bytearray.fromhex(values), dtype=dtype).reshape(spec["shape"])
    if spec["layout"] == "transposed":
        return plain.t().contiguous().t()
    if spec["layout"] == "channels_last":
        return plain.contiguous(memory_format=torch.channels_last)
    return plain.clone()


class Training:
    def __init__(self, program):
        self.program = program
        self.params = [tensor(p, p["values"]).requires_grad_() for p in program["params"]]
        groups = []
        for index, options in enumerate(program["groups"]):
            members = [t for t, p in zip(self.params, program["params"]) if p["group"] == index]
            groups.append({**options, "params": members})
        # Of the groups' own PyTorch takes no notice.
        initial = [options["initial_accumulator_value"] for options in groups if program["algorithm"] == "Adagrad"]
        defaults = {"initial_accumulator_value": initial[0]} if initial else {}
        self.optimizer = CLASSES[program["algorithm"]](groups, lr=1e-3, fused=True, **defaults)
        # Adagrad says so from PyTorch 2.13 on, and could before.
        self.optimizer._step_supports_amp_scaling = True
        self.scaler = torch.amp.GradScaler("cpu", enabled=program["mode"] != "plain", init_scale=program["scale"])
        self.scaler.scale(torch.tensor(1.0))

    def backward(self, grads):
        self.optimizer.zero_grad()
        for param, spec, values in zip(self.params, self.program["params"], grads):
            if values is not None:
                (param * tensor(spec, values)).sum().backward()

    def clip(self, max_norm):
        """The squares are added up in f64; what is done with the norm is PyTorch's."""
        grads = [param.grad for param in self.params if param.grad is not None]
        squares = torch.stack([grad.double().square().sum() for grad in grads])
        total = squares.sum().sqrt()
        if any(grad.dtype != torch.float64 for grad in grads):
            total = total.float()
        torch.nn.utils.clip_grads_with_norm_(self.params, max_norm, total)

    def step(self, step):
        self.backward(step["grads"])
        if step["lr"] is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = step["lr"]
        mode = self.program["mode"]
        if mode in ("unscale", "clip", "transaction"):
            self.scaler.unscale_(self.optimizer)
        if mode in ("clip", "transaction"):
            self.clip(step["max_norm"])
        fresh = [p for p in self.params if self.optimizer.state[p].get("momentum_buffer") is None]
        self.scaler.step(self.optimizer)
        if step["overflow"]:
            # PyTorch takes a skipped first step for taken and goes on with a buffer that nobody has written.
            for param in fresh:
                if "momentum_buffer" in self.optimizer.state[param]:
                    self.optimizer.state[param]["momentum_buffer"] = None
        self.scaler.update()

    def told(self):
        out = []
        for param in self.params:
            state = self.optimizer.state.get(param, {})
            if self.program["algorithm"] != "Adagrad" and "step" in state and state["step"] == 0:
                state = {}  # made in a step that was skipped; Adagrad's is there from the start
            tensors = [state[key] for key in KEYS if isinstance(state.get(key), torch.Tensor)]
            out.append(",".join(bits(t) for t in [param, *tensors]))
        return " ".join(out) + f" {self.scaler.get_scale()}"


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        program = json.loads(line)
        training = Training(program)
        for step in program["steps"]:
            training.step(step)
            print(training.told(), flush=True)


main()
