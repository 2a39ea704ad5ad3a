"""Loads a scaler state from stdin into torch.amp.GradScaler, takes three finite steps and one that overflows, then one
more finite step, and prints the state."""

import json
import sys

import torch

scaler = torch.amp.GradScaler("cpu")
scaler.load_state_dict(json.load(sys.stdin))
w = torch.ones(3, requires_grad=True)
opt = torch.optim.SGD([w], lr=1.0)
for factor in (1.0, 1.0, 1.0, float("inf"), 1.0):
    opt.zero_grad()
    scaler.scale((w * factor).sum()).backward()
    scaler.step(opt)
    scaler.update()
json.dump(scaler.state_dict(), sys.stdout)
