"""Runs GradScaler programs: one JSON program a line on stdin, one line an operation on stdout.

tests/steps/scaler/programs/program.rs says what a program is and what each operation means.
Each answer is the outcome of the operation, then the whole state after it, or "=" where the state is as it was.
All is computed on the CPU. Clipping, which rounds otherwise on a GPU, is computed here as there for a program on
GPUs. With `--cuda` all is computed by PyTorch on the first GPU, and without a GPU nothing is printed.
"""

import ctypes
import functools
import json
import math
import operator
import struct
import sys

import torch

sys.dont_write_bytecode = True  # the source tree stays as it is
import cuda  # noqa: E402
from scaler_deviations import Refused, Scaler  # noqa: E402

DEVICE = torch.device("cuda", 0) if sys.argv[1:] == ["--cuda"] else torch.device("cpu")
DTYPES = {"Float": torch.float32, "Double": torch.float64, "BFloat16": torch.bfloat16}

# PyTorch's message, and the word for it that both sides print.
ERRORS = (
    ("unscale_() has already been called", "unscaled-twice"),
    ("unscale_() is being called after step()", "unscaled-after-step"),
    ("step() has already been called", "stepped-twice"),
    ("No inf checks were recorded prior to update", "no-inf-checks"),
    ("may only be pickled at the beginning", "iteration-open"),
)


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor):
    """The bytes, every NaN with all bits set: which one a product of two has is nobody's business."""
    tensor = tensor.detach().cpu()
    nans = tensor.isnan()
    if nans.any():
        tensor = tensor.view(INTEGERS[tensor.element_size()]).masked_fill(nans, -1)
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def bits(tensor):
    return raw(tensor).hex()


def told(state):
    """The text of a state."""
    numbers, factors, calls, values, grads = state
    scale, tracker = numbers or (struct.pack("<f", 1.0), bytes(4))
    text = f"scale:{scale.hex()} tracker:{int.from_bytes(tracker, 'little', signed=True)} "
    if factors:
        growth, backoff, interval = factors
        text += f"{struct.pack('<d', growth).hex()}/{struct.pack('<d', backoff).hex()}/{interval}"
    text += f" steps:{'/'.join(map(str, calls))} "
    text += "".join([value.hex() + "/" for value in values])
    return text + " grads:" + "".join([(grad.hex() or "-") + "/" for grad in grads])


def norm_on_cpu(grads):
    """The squares are added up in f64, one after the other. The norm is f32, unless that cannot hold it."""
    # Not `sum`, which compensates for rounding from Python 3.12 on.
    add = functools.partial(functools.reduce, operator.add)
    squares = [add((x * x for x in grad.double().flatten().tolist()), 0.0) for grad in grads]
    total = torch.tensor(math.sqrt(add(squares, 0.0)), dtype=torch.float64)
    is_wide = all(grad.dtype == torch.float64 for grad in grads)
    too_large = total.isfinite() and not total.float().isfinite()
    return total if is_wide or too_large else total.float()


def clip_norm(params, max_norm, is_cuda):
    """PyTorch's clipping, by a norm that is taken as ours is."""
    grads = [param.grad for param in params if param.grad is not None]
    if not grads or DEVICE.type == "cuda":
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    total = cuda.norm(grads) if is_cuda else norm_on_cpu(grads)
    clip = cuda.clip_grads_with_norm if is_cuda else torch.nn.utils.clip_grads_with_norm_
    clip(params, max_norm, total)
    return total


def clip_value(params, limit):
    # PyTorch's own function fails without any gradient.
    if any(param.grad is not None for param in params):
        torch.nn.utils.clip_grad_value_(params, limit)


def of_eighths(numbers, dtype):
    return torch.tensor([number / 8 for number in numbers], dtype=dtype, device=DEVICE)


def count_calls(optimizer):
    # Without the profiler's wrapper around it, which costs more than the step.
    step = type(optimizer).step.__wrapped__

    def counted():
        optimizer.calls += 1
        return step(optimizer)

    optimizer.calls = 0
    optimizer.step = counted


class Machine:
    """A model, its optimizers and a scaler."""

    def __init__(self, is_cuda, program):
        self.is_cuda = is_cuda
        self.enabled = program["enabled"]
        self.scaler = self.new_scaler(program["config"])
        self.params, self.owned, self.optimizers = [], [], []
        for optimizer in program["optimizers"]:
            self.add_optimizer(**optimizer)
        self.before = None

    def new_scaler(self, config):
        return Scaler(DEVICE.type, **config, enabled=self.enabled)

    def add_optimizer(self, rule, params):
        owned = [self.param(**param) for param in params]
        [(name, options)] = rule.items()
        if name == "Sgd":
            optimizer = torch.optim.SGD(owned, **options, foreach=False, fused=False)
        else:
            betas = options.pop("beta1"), options.pop("beta2")
            optimizer = torch.optim.AdamW(owned, betas=betas, **options, foreach=False, fused=False)
        count_calls(optimizer)
        self.optimizers.append(optimizer)
        self.owned.append(owned)

    def param(self, New=None, Shared=None):
        """A new parameter, or one of an optimizer before."""
        if New is None:
            return self.params[Shared]
        values = of_eighths(New["eighths"], DTYPES[New["dtype"]])
        self.params.append(values.requires_grad_())
        return self.params[-1]

    def answer(self, op):
        name = op.pop("op")
        try:
            outcome = getattr(self, "op_" + name)(**op)
        except Refused as error:
            outcome = str(error)
        except (RuntimeError, AssertionError) as error:
            outcome = next((word for text, word in ERRORS if text in str(error)), f"error: {error}")
        state = self.state()
        changed, self.before = state != self.before, state
        return f"{outcome or 'ok'} {told(state) if changed else '='}"

    def state(self):
        """The state as bytes and numbers: taken after every operation, so it must be quick."""
        scaler, params = self.scaler, self.params
        return (
            [raw(scaler._scale), raw(scaler._growth_tracker)] if self.enabled else None,
            [scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval] if self.enabled else None,
            [optimizer.calls for optimizer in self.optimizers],
            [raw(param) for param in params],
            [b"" if (grad := param.grad) is None else raw(grad) for param in params],
        )


    # ---- operations

    def op_start(self):
        return "ok"

    def op_backward(self, how, terms):
        losses = [self.loss(**term) for term in terms]
        if how == "Each":
            first, rest = self.scaler.scale((losses[0], losses[1:]))
            for loss in [first, *rest]:
                loss.backward()
            return
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        self.scaler.scale(total).backward()

    def loss(self, param, eighths):
        param = self.params[param]
        return (param * of_eighths(eighths, param.dtype)).sum()

    def op_plant(self, param, element, value):
        grad = self.params[param].grad
        if grad is not None:
            grad[element] = float(value)

    def op_drop(self, param):
        self.params[param].grad = None

    def op_zero_grad(self, optimizer):
        for param in self.owned[optimizer]:
            param.grad = None

    def op_zeros(self, optimizer):
        for param in self.owned[optimizer]:
            if param.grad is not None:
                param.grad.zero_()

    def op_unscale(self, optimizer):
        self.scaler.unscale_(self.optimizers[optimizer])

    def op_clip_norm(self, optimizer, max_norm):
        """As tch's Optimizer::clip_grad_norm does it, which differs from PyTorch's in the last bits."""
        grads = [param.grad for param in self.owned[optimizer] if param.grad is not None]
        if not grads:
            return
        total = torch.stack([grad.norm() for grad in grads]).norm().item()
        coefficient = max_norm / (total + 1e-6)
        if coefficient < 1.0:
            for grad in grads:
                # tch calls the Scalar overload, which rounds bf16 in another place than `grad.mul_(coefficient)`.
                torch.ops.aten.mul_.Scalar(grad, coefficient)

    def op_clip_value(self, optimizer, max):
        clip_value(self.owned[optimizer], max)

    def op_step(self, optimizer):
        return self.scaler.step_outcome(self.optimizers[optimizer])

    def op_transaction(self, parts):
        """Each part is an optimizer and how to clip; all are open at once."""
        for index, _ in parts:
            self.scaler.unscale_(self.optimizers[index])
        return "+".join(self.transact(index, clip) for index, clip in parts)

    def transact(self, index, clip):
        owned, norm, total = self.owned[index], None, ""
        if clip == "Not":
            return self.scaler.step_outcome(self.optimizers[index])
        self.scaler.check_unchanged(self.optimizers[index])
        if "Norm" in clip:
            norm = clip_norm(owned, clip["Norm"], self.is_cuda)
            total = "/" + bits(norm)
        else:
            clip_value(owned, clip["Value"])
        self.scaler.note_clipped(self.optimizers[index], norm)
        return self.scaler.step_outcome(self.optimizers[index]) + total

    def op_move(self):
        """In Rust an optimizer has an address that can change; in Python it has not."""

    def op_update(self):
        self.scaler.update()

    def op_update_with(self, scale):
        self.scaler.update(scale)

    def op_update_with_tensor(self, scale):
        self.scaler.update(torch.tensor(scale, device=DEVICE))

    def op_set_growth_factor(self, factor):
        self.scaler.set_growth_factor(factor)

    def op_set_backoff_factor(self, factor):
        self.scaler.set_backoff_factor(factor)

    def op_set_growth_interval(self, interval):
        self.scaler.set_growth_interval(interval)

    def op_reload(self, config):
        state = self.scaler.state_dict()
        scaler = self.new_scaler(config)
        if state:
            scaler.load_state_dict(state)
        self.scaler = scaler


def main():
    torch.set_num_threads(1)
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        return
    for line in sys.stdin:
        is_cuda, program = json.loads(line)
        machine = Machine(is_cuda, program)
        answers = [machine.answer(op) for op in [{"op": "start"}, *program["ops"]]]
        sys.stdout.write("\n".join(answers) + "\n")
        sys.stdout.flush()


main()
