"""Trains with torch.optim, with fused=True where it has that: a JSON program a line on stdin, a line of bits for each of its steps on stdout.

tests/steps/optim/programs writes the programs. All is computed on the CPU. Where a GPU rounds otherwise, in clipping and
in the update of halves, the same is done here for a program on GPUs. With `--cuda` all is computed by PyTorch on the
first GPU, a program that it refuses there is answered with lines of `error`, and without a GPU nothing is printed.
"""

import contextlib
import functools
import json
import sys

import cuda
import torch

DEVICE = torch.device("cuda", 0) if sys.argv[1:] == ["--cuda"] else torch.device("cpu")
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
KEYS = (
    "step exp_avg exp_avg_sq max_exp_avg_sq momentum_buffer sum square_avg grad_avg mu_product row_var col_var variance"
).split()


class Lion(torch.optim.Optimizer):
    """As in https://arxiv.org/abs/2302.06675, since torch.optim does not have it."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                grad, average = -param.grad if group["maximize"] else param.grad, state["exp_avg"]
                update = average.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
                average.mul_(beta2).add_(grad, alpha=1 - beta2)
                param.mul_(1 - lr * group["weight_decay"]).sub_(update, alpha=lr)


def in_f32_between_steps(cls):
    """An optimizer without a fused version, with what those do for halves: they are read as f32 numbers, computed like
    those, and rounded when they are written.
    """

    class Computed(cls):
        def step(self, prepare=lambda grad: grad):
            params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            before = [(p, p.dtype, p.grad) for p in params]
            for param, dtype, grad in before:
                wide = torch.promote_types(dtype, torch.float32)
                param.grad = None
                param.data = param.data.to(wide)
                param.grad = prepare(grad.to(wide))
                self.convert(param, wide)
            super().step()
            for param, dtype, grad in before:
                param.grad = None
                param.data = param.data.to(dtype)
                param.grad = grad
                self.convert(param, dtype)

        def convert(self, param, dtype):
            state = self.state.get(param, {})
            for key in state:
                if key not in ("step", "mu_product"):
                    state[key] = state[key].to(dtype)

    return Computed


class MuonAndAdamW(torch.optim.Optimizer):
    """torch.optim.Muon for the matrices of the groups that use it, and a fused torch.optim.AdamW for the rest."""

    def __init__(self, groups, lr, fused):
        super().__init__(groups, {"lr": lr})
        self.parts = []
        self.makes_states = False  # also in a step that is skipped
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.ndim == 2 and group["use_muon"]]
            rest = [p for p in group["params"] if not (p.ndim == 2 and group["use_muon"])]
            keys = ("weight_decay", "momentum", "nesterov", "eps", "ns_steps", "adjust_lr_fn")
            options = {key: group[key] for key in keys}
            options["ns_coefficients"] = tuple(group["ns_coefficients"])
            if matrices:
                self.parts.append((group, 1.0, in_f32_between_steps(torch.optim.Muon)(matrices, **options)))
            if rest:
                adamw = torch.optim.AdamW(rest, **group["adamw"], fused=fused)
                self.parts.append((group, group["adamw_lr_factor"], adamw))

    def step(self):
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group, factor, part in self.parts:
            part.param_groups[0]["lr"] = group["lr"] * factor
            if isinstance(part, torch.optim.AdamW):
                part.grad_scale, part.found_inf = scale, found_inf
                part.step()
            else:
                self.step_muon(part, scale, found_inf)
            for param, state in part.state.items():
                self.state[param] = state

    def step_muon(self, part, scale, found_inf):
        params = [p for p in part.param_groups[0]["params"] if p.grad is not None]
        if found_inf is not None and found_inf.item():
            if self.makes_states:
                for param in params:
                    part.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
            return
        scale, clip = getattr(self, "unscaling", (scale, None))
        factors = [] if scale is None else [scale.double().reciprocal().float()]
        factors += [] if clip is None else [clip]
        part.step(lambda grad: functools.reduce(lambda a, b: a * b.to(a.dtype), factors, grad))


CLASSES = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "Sgd": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "RmsProp": in_f32_between_steps(torch.optim.RMSprop),
    "Lion": in_f32_between_steps(Lion),
    "Muon": MuonAndAdamW,
    "NAdam": in_f32_between_steps(torch.optim.NAdam),
    "Adafactor": in_f32_between_steps(torch.optim.Adafactor),
}
# Those without a fused version: the scaler unscales their gradients before their step.
COMPOSED = ("RmsProp", "Lion", "NAdam", "Adafactor")


def bits(tensor):
    plain = tensor.detach().contiguous().cpu()
    words = plain.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])
    # Every NaN is the same one, as in testkit/src/bits.rs.
    words = words.masked_fill(plain.view(-1).isnan(), -1)
    return bytes(words.view(torch.uint8).tolist()).hex()


def tensor(spec, values):
    dtype = DTYPES[spec["dtype"]]
    if not values:
        return torch.empty(spec["shape"], dtype=dtype, device=DEVICE)
    plain = torch.frombuffer(bytearray.fromhex(values), dtype=dtype).reshape(spec["shape"]).to(DEVICE)
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


# By what the gradients of a step on GPUs are unscaled and clipped: the reciprocal of the scale, and the factor.
multiplied_by = ()


def clipped_in_f64(kernel):
    """Unscales and clips f64 gradients before the step, as unscale_ and clip_grad_norm_ do: the kernels divide by an f32
    number.
    """

    def computed(params, grads, *args, **kwargs):
        if multiplied_by and params[0].dtype == torch.float64:
            grads = [functools.reduce(torch.mul, multiplied_by, grad) for grad in grads]
            kwargs["grad_scale"] = None
        kernel(params, grads, *args, **kwargs)

    return computed


# What torch.optim calls on the CPU, and what computes the same as the crate does on GPUs.
KERNELS = {
    "_fused_adagrad_": (torch._fused_adagrad_, clipped_in_f64(torch._fused_adagrad_)),
    "_fused_adam_": (torch._fused_adam_, clipped_in_f64(in_f32(torch._fused_adam_))),
    "_fused_adamw_": (torch._fused_adamw_, clipped_in_f64(in_f32(torch._fused_adamw_))),
    "_fused_sgd_": (torch._fused_sgd_, clipped_in_f64(torch._fused_sgd_)),
}


class Training:
    def __init__(self, program):
        self.program = program
        self.emulates_gpus = program["gpus"] > 0 and DEVICE.type == "cpu"
        for name, kernels in KERNELS.items():
            setattr(torch, name, kernels[self.emulates_gpus])
        self.params = [tensor(p, p["values"]).requires_grad_() for p in program["params"]]
        groups = []
        for index, options in enumerate(program["groups"]):
            members = [t for t, p in zip(self.params, program["params"]) if p["group"] == index]
            groups.append({**options, "params": members})
        # Of the groups' own PyTorch takes no notice.
        initial = [options["initial_accumulator_value"] for options in groups if program["algorithm"] == "Adagrad"]
        defaults = {"initial_accumulator_value": initial[0]} if initial else {}
        self.composed = program["algorithm"] in COMPOSED
        if not self.composed:
            defaults["fused"] = True
        elif program["algorithm"] != "Lion":
            defaults["foreach"] = False
        self.optimizer = CLASSES[program["algorithm"]](groups, lr=1e-3, **defaults)
        if not self.composed:
            # Adagrad says so from PyTorch 2.13 on, and could before.
            self.optimizer._step_supports_amp_scaling = True
        self.optimizer.makes_states = program["gpus"] > 0
        self.scaler = torch.amp.GradScaler(
            DEVICE.type, enabled=program["mode"] != "plain", init_scale=program["scale"]
        )
        self.scaler.scale(torch.tensor(1.0, device=DEVICE))

    def backward(self, grads):
        self.optimizer.zero_grad()
        for param, spec, values in zip(self.params, self.program["params"], grads):
            if values is not None:
                (param * tensor(spec, values)).sum().backward()

    def clip(self, max_norm):
        """What is done with the norm is PyTorch's."""
        if DEVICE.type == "cuda":
            torch.nn.utils.clip_grad_norm_(self.params, max_norm)
        elif self.emulates_gpus:
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
        if all(norm.dtype == torch.float64 for norm in norms):
            return functools.reduce(torch.hypot, norms)
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))

    def clip_factor(self, max_norm):
        """From gradients that are scaled."""
        norm = self.norm_on_gpus(self.scaler._scale.double().reciprocal().float())
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)

    @contextlib.contextmanager
    def prepared(self, step):
        """Does what comes before the scaler's step."""
        mode = self.program["mode"]
        if mode == "clip" and self.emulates_gpus:
            factor = self.clip_factor(step["max_norm"])
            if self.composed:
                self.scaler.unscale_(self.optimizer)
                for param in self.params:
                    if param.grad is not None:
                        param.grad.mul_(factor if param.grad.dtype == torch.float64 else factor.float())
                yield
                return
            # What the kernels of a GPU divide by where they unscale and clip in one: they take a single number.
            divisor = self.scaler._scale / factor.float()
            # The scaler hands it to the fused optimizer.
            self.scaler._get_scale_async = lambda: divisor
            # Muon multiplies by each.
            self.optimizer.unscaling = (self.scaler._scale, factor)
            # And f64 gradients.
            global multiplied_by
            multiplied_by = (self.scaler._scale.double().reciprocal().float(), factor)
            yield
            del self.scaler._get_scale_async, self.optimizer.unscaling
            multiplied_by = ()
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
                if "momentum_buffer" in self.optimizer.state[param] and self.program["algorithm"] != "Muon":
                    self.optimizer.state[param]["momentum_buffer"] = None
            if self.composed and self.program["gpus"]:
                self.make_states()
        self.scaler.update()

    def make_states(self):
        """What a skipped first step leaves on a GPU, where the host does not know of the skip."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param]
                if param.grad is None or state:
                    continue
                keys = ["exp_avg"]
                if self.program["algorithm"] == "RmsProp":
                    state["step"] = torch.zeros(())
                    keys = ["square_avg"]
                    keys += ["momentum_buffer"] if group["momentum"] > 0 else []
                    keys += ["grad_avg"] if group["centered"] else []
                if self.program["algorithm"] == "NAdam":
                    state["step"], state["mu_product"] = torch.zeros(()), torch.ones(())
                    keys += ["exp_avg_sq"]
                if self.program["algorithm"] == "Adafactor":
                    state["step"], keys = torch.zeros(()), []
                    if param.ndim < 2:
                        keys = ["variance"]
                    else:
                        state["row_var"], state["col_var"] = torch.zeros_like(param[..., :1]), torch.zeros_like(param[..., :1, :])
                for key in keys:
                    state[key] = torch.zeros_like(param)

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


def run_on_gpu(program):
    """Prints the lines of a program that PyTorch may refuse on a GPU."""
    done = 0
    try:
        training = Training(program)
        for step in program["steps"]:
            training.step(step)
            print(training.told(), flush=True)
            done += 1
    except (RuntimeError, AssertionError) as error:
        for _ in program["steps"][done:]:
            print("error", str(error).splitlines()[0], flush=True)


def main():
    torch.set_num_threads(1)
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        return
    for line in sys.stdin:
        program = json.loads(line)
        if DEVICE.type == "cuda":
            run_on_gpu(program)
            continue
        training = Training(program)
        for step in program["steps"]:
            training.step(step)
            print(training.told(), flush=True)


main()
