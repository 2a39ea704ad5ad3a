"""Loads a scaler state from stdin into torch.amp.GradScaler, takes a step for each letter of its argument, `o` for one
that overflows and `.` for a finite one, and prints the state."""

import json
import sys

import torch

scaler = torch.amp.GradScaler("cpu")
scaler.load_state_dict(json.load(sys.stdin))
w = torch.ones(3, requires_grad=True)
opt = torch.optim.SGD([w], lr=1.0)
for letter in sys.argv[1]:
    factor = float("inf") if letter == "o" else 1.0
    opt.zero_grad()
    scaler.scale((w * factor).sum()).backward()
    scaler.step(opt)
    scaler.update()
json.dump(scaler.state_dict(), sys.stdout)
