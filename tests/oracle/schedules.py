"""Prints the learning rates and momenta of torch.optim.lr_scheduler: JSON [case, ...] on stdin, and on stdout a line of
JSON for each, a list of [learning rates, momenta] after the start and after each step.

A case has the options of a schedule as tests/steps/schedule/oracle.rs writes them, the learning rates of the groups, the
number of steps, and the learning rates that the program itself sets before some of the steps. A case with metrics is
one of ReduceLROnPlateau. One with "saved" writes, after "at" of the steps, the states of the scheduler and of the
optimizer into files, in the layout of Hugging Face's Trainer, of Lightning, or of a dict of states. With "program" the
state has the form of another program or of an older PyTorch.
"""

import functools
import json
import math
import sys

import torch
from torch.optim import lr_scheduler as schedulers

sys.dont_write_bytecode = True

NAMES = {
    "StepLr": "StepLR",
    "MultiStepLr": "MultiStepLR",
    "ConstantLr": "ConstantLR",
    "LinearLr": "LinearLR",
    "ExponentialLr": "ExponentialLR",
    "PolynomialLr": "PolynomialLR",
    "CosineAnnealingLr": "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts": "CosineAnnealingWarmRestarts",
    "OneCycleLr": "OneCycleLR",
}


def linear_with_warmup(warmup_steps, total_steps):
    """Hugging Face's get_linear_schedule_with_warmup."""

    def factor(step):
        if step < warmup_steps:
            return float(step) / float(max(1, warmup_steps))
        return max(0.0, float(total_steps - step) / float(max(1, total_steps - warmup_steps)))

    return factor


def inverse_sqrt(warmup_steps):
    """Hugging Face's get_inverse_sqrt_schedule."""

    def factor(step):
        if step < warmup_steps:
            return float(step) / float(max(1, warmup_steps))
        return 1.0 / math.sqrt(step / warmup_steps)

    return factor


def cosine_with_warmup(step, *, warmup_steps, total_steps, num_cycles):
    """Hugging Face's get_cosine_schedule_with_warmup, which is a functools.partial of such a function."""
    if step < warmup_steps:
        return float(step) / float(max(1, warmup_steps))
    progress = float(step - warmup_steps) / float(max(1, total_steps - warmup_steps))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * progress)))


def build(options, optimizer):
    options = dict(options)
    name = options.pop("schedule")
    if name in ("SequentialLr", "ChainedScheduler"):
        parts = [build(part, optimizer) for part in options["schedules"]]
        if name == "ChainedScheduler":
            return schedulers.ChainedScheduler(parts, optimizer)
        return schedulers.SequentialLR(optimizer, parts, options["milestones"])
    if name == "LinearWithWarmup":
        return schedulers.LambdaLR(optimizer, linear_with_warmup(**options))
    if name == "CosineWithWarmup":
        return schedulers.LambdaLR(optimizer, functools.partial(cosine_with_warmup, **options))
    if name == "InverseSqrtLr":
        return schedulers.LambdaLR(optimizer, inverse_sqrt(**options))
    renamed = {"t_max": "T_max", "t_0": "T_0", "t_mult": "T_mult"}
    options = {renamed.get(key, key): value for key, value in options.items()}
    if name == "OneCycleLr" and len(options["max_lr"]) == 1:
        options["max_lr"] = options["max_lr"][0]
    return getattr(schedulers, NAMES[name])(optimizer, **options)


def momentum(group):
    return group["betas"][0] if "betas" in group else group["momentum"]


def of_program(program, state):
    """A state in the form of another program or of an older PyTorch, which saved a function in the place of its name,
    and before that the lengths of two phases in the place of the list."""
    if program == "detectron2":
        return {key: state[key] for key in ("base_lrs", "last_epoch")}
    if program == "mmengine":
        renamed = {"base_lrs": "base_values", "last_epoch": "last_step", "_last_lr": "_last_value"}
        is_own = lambda key: key in renamed or not key.startswith("_")
        own = {renamed.get(key, key): value for key, value in state.items() if is_own(key)}
        steps = {"_global_step": state["last_epoch"], "begin": 0, "end": 10**9, "by_epoch": True}
        return {"param_name": "lr", **steps, **own}
    if program in ("1.13", "1.6"):
        state = dict(state)
        state["anneal_func"] = getattr(schedulers.OneCycleLR, "_annealing_" + state.pop("_anneal_func_type"))
    if program == "1.6":
        up = float(state.pop("_schedule_phases")[0]["end_step"])
        state.update({"step_size_up": up, "step_size_down": float(state["total_steps"] - up) - 1})
    return state


def save(saved, scheduler, optimizer):
    scheduler, optimizer = of_program(saved.get("program"), scheduler.state_dict()), optimizer.state_dict()
    path = saved["path"]
    if saved["layout"] == "trainer":
        torch.save(scheduler, path)
        torch.save(optimizer, path + ".optimizer.pt")
    elif saved["layout"] == "lightning":
        scheduler["verbose"] = False  # as PyTorch before 2.7
        torch.save({"lr_schedulers": [scheduler], "optimizer_states": [optimizer]}, path)
    else:
        torch.save({"sched": scheduler, "opt": optimizer}, path)


def run(case):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in case["lrs"]]
    kind = torch.optim.AdamW if case["adam"] else torch.optim.SGD
    optimizer = kind(groups, lr=0.1)
    rates = lambda: [[group["lr"], momentum(group)] for group in optimizer.param_groups]
    saved = case.get("saved", {"at": None})
    if "metrics" in case:
        scheduler = schedulers.ReduceLROnPlateau(optimizer, **case["options"])
        yield rates()
        for step, metric in enumerate(case["metrics"]):
            scheduler.step(metric)
            if step + 1 == saved["at"]:
                save(saved, scheduler, optimizer)
            yield rates()
        return
    scheduler = build(case["options"], optimizer)
    yield rates()
    for step in range(case["steps"]):
        for group, lr in zip(optimizer.param_groups, case["set"].get(str(step), [])):
            group["lr"] = lr
        optimizer.step()
        scheduler.step()
        if step + 1 == saved["at"]:
            save(saved, scheduler, optimizer)
        yield rates()


for case in json.load(sys.stdin):
    print(json.dumps(list(run(case))), flush=True)
