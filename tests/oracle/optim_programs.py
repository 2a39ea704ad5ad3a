"""Trains with torch.optim and fused=True: a JSON program a line on stdin, a line of bits for each of its steps on stdout.

tests/optim_programs writes the programs. All is computed on the CPU. Where a GPU rounds otherwise, in clipping and
in the update of halves, the same is done here for a program on GPUs.
"""

import contextlib
import json
import sys

import torch

sys.dont_write_bytecode = True  # the source tree stays as it is
import cuda  # noqa: E402

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


def in_f32(kernel):
    """A fused kernel as CUDA has it: halves are read as f32 numbers, computed like those, and rounded when they are
    written. The CPU's kernel for halves does, too, but takes the last elements of a tensor by other instructions than
    its kernel for f32 does, which the simulation runs on f32 copies.
    """

    def computed(*args, **kwargs):
        lists = args[:5]
        wide = [[t.float() if t.element_size() == 2 else t for t in tensors] for tensors in lists]
        kernel(*wide, *args[5:], **kwargs)
        for tensors, results in zip(lists, wide):
            for t, result in zip(tensors, results):
                t.copy_(result)

    return computed


# What torch.optim calls on the CPU, and on CUDA.
KERNELS = {
    name: (kernel, in_f32(kernel)) for name, kernel in vars(torch).items() if name in ("_fused_adam_", "_fused_adamw_")
}


class Training:
    def __init__(self, program):
        self.program = program
        for name, kernels in KERNELS.items():
            setattr(torch, name, kernels[program["gpus"] > 0])
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
        """What is done with the norm is PyTorch's."""
        if self.program["gpus"]:
            cuda.clip_grads_with_norm(self.params, max_norm, self.norm_on_gpus(torch.ones(())))
        else:
            torch.nn.utils.clip_grads_with_norm_(self.params, max_norm, self.norm_on_cpu())

    def norm_on_cpu(self):
        """The squares are added up in f64. The norm is f32, unless that cannot hold it."""
        grads = [param.grad for param in self.params if param.grad is not None]
        squares = torch.stack([grad.double().square().sum() for grad in grads])
        total = squares.sum().sqrt()
        is_wide = all(grad.dtype == torch.float64 for grad in grads)
        too_large = total.isfinite() and not total.float().isfinite()
        return total if is_wide or too_large else total.float()

    def norm_on_gpus(self, factor):
        """As PyTorch takes it on CUDA: a norm of each device, which `factor` unscales, and then the norm of those."""
        grads = {}
        for index, param in enumerate(self.params):
            if param.grad is not None:
                grads.setdefault(index % self.program["gpus"], []).append(param.grad)
        norms = [cuda.norm(grads) * factor for grads in grads.values()]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))

    def divisor(self, max_norm):
        """What the kernels of a GPU divide by where they unscale and clip in one: they take a single number."""
        scale = self.scaler._scale
        norm = self.norm_on_gpus(scale.double().reciprocal().float())
        return scale / (max_norm / (norm + 1e-6)).clamp(max=1.0).float()

    @contextlib.contextmanager
    def prepared(self, step):
        """Does what comes before the scaler's step."""
        mode = self.program["mode"]
        if mode == "clip" and self.program["gpus"]:
            divisor = self.divisor(step["max_norm"])
            # The scaler hands it to the fused optimizer.
            self.scaler._get_scale_async = lambda: divisor
            yield
            del self.scaler._get_scale_async
            return
        if mode in ("unscale", "clip", "transaction"):
            self.scaler.unscale_(self.optimizer)
        if mode in ("clip", "transaction"):
            self.clip(step["max_norm"])
        yield

    def step(self, step):
        self.backward(step["grads"])
        if step["lr"] is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = step["lr"]
        fresh = [p for p in self.params if self.optimizer.state[p].get("momentum_buffer") is None]
        with self.prepared(step):
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
            skipped = "step" in state and state["step"] == 0 and self.program["algorithm"] != "Adagrad"
            if skipped and not self.program["gpus"]:
                # Made in a step that was skipped; Adagrad's is there from the start. On a GPU the host does not know of
                # the skip, and the crate's is there as well.
                state = {}
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
