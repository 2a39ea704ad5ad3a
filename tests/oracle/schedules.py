"""Prints the learning rates and momenta of torch.optim.lr_scheduler: JSON [case, ...] on stdin, and on stdout a line of
JSON for each, a list of [learning rates, momenta] after the start and after each step.

A case has the options of a schedule as tests/steps/schedule/oracle.rs writes them, the learning rates of the groups, the
number of steps, and the learning rates that the program itself sets before some of the steps. A case with metrics is
one of ReduceLROnPlateau. One with "saved" writes, after "at" of the steps, the states of the scheduler and of the
optimizer into files, in the layout of Hugging Face's Trainer, of Lightning, or of a dict of states.
"""

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
    if name == "InverseSqrtLr":
        return schedulers.LambdaLR(optimizer, inverse_sqrt(**options))
    renamed = {"t_max": "T_max", "t_0": "T_0", "t_mult": "T_mult"}
    options = {renamed.get(key, key): value for key, value in options.items()}
    if name == "OneCycleLr" and len(options["max_lr"]) == 1:
        options["max_lr"] = options["max_lr"][0]
    return getattr(schedulers, NAMES[name])(optimizer, **options)


def momentum(group):
    return group["betas"][0] if "betas" in group else group["momentum"]


def save(saved, scheduler, optimizer):
    scheduler, optimizer = scheduler.state_dict(), optimizer.state_dict()
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
