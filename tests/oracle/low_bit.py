"""Exchanges states of AdamW with tests/checkpoint/low_bit.rs.

save FILE: takes 60 steps and writes the model and the state.
resume FILE OUT: loads what this crate has written from 8-bit moments, checks that it is what torch.optim saves,
takes a step, and writes its state to OUT.
"""

import sys

import torch
from torch import nn


def made():
    torch.manual_seed(3)
    net = nn.Linear(100, 70)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)


def train(net, opt, steps):
    for _ in range(steps):
        opt.zero_grad()
        net(torch.randn(8, 100)).square().mean().backward()
        opt.step()


def save(path):
    net, opt = made()
    train(net, opt, 60)
    torch.save({"model": net.state_dict(), "optimizer": opt.state_dict()}, path)


def resume(path, out):
    net, opt = made()
    saved = torch.load(path, weights_only=True)
    for state in saved["optimizer"]["state"].values():
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"], sorted(state)
        assert all(tensor.dtype == torch.float32 for tensor in state.values())
    net.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    for param in net.parameters():
        assert opt.state[param]["step"] == 65
        assert opt.state[param]["exp_avg"].shape == param.shape
    train(net, opt, 1)
    assert all(param.isfinite().all() for param in net.parameters())
    torch.save({"model": net.state_dict(), "optimizer": opt.state_dict()}, out)


if __name__ == "__main__":
    {command.__name__: command for command in [save, resume]}[sys.argv[1]](*sys.argv[2:])
