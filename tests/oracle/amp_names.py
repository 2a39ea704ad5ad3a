"""Prints every public name of torch.amp, torch.cuda.amp and torch.cpu.amp, and the functions of torch that read or set
the autocast state, one in a line. Methods of GradScaler begin with `scaler`."""

import importlib
import inspect
import pkgutil

import torch


def public(names):
    return sorted(name for name in names if not name.startswith("_"))


def names_of(package):
    module = importlib.import_module(package)
    own = [name for name in public(dir(module)) if not inspect.ismodule(getattr(module, name))]
    yield from (f"{package}.{name}" for name in own)
    for found in pkgutil.iter_modules(module.__path__):
        inner = f"{package}.{found.name}"
        # The others are those of the package, too.
        others = set(importlib.import_module(inner).__all__) - set(own)
        yield from (f"{inner}.{name}" for name in public(others))


for package in ("torch.amp", "torch.cuda.amp", "torch.cpu.amp"):
    print(*names_of(package), sep="\n")
print(*(f"scaler.{name}" for name in public(vars(torch.amp.GradScaler))), sep="\n")
print(*(f"torch.{name}" for name in public(dir(torch)) if "autocast" in name), sep="\n")
