"""Exchanges states of AdamW and Muon with tests/files/checkpoint/low_bit.rs.

save FILE: takes 60 steps of AdamW and writes the model and the state.
resume FILE OUT: loads what this crate has written from moments of fewer bits, checks that it is what torch.optim saves,
takes a step, and writes its state to OUT.
save_muon FILE, resume_muon FILE OUT: the same with Muon for the weight and AdamW for the bias. This crate may have
added a step count to what Muon saves.
"""

import sys

import torch
from torch import nn


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)


def made():
    torch.manual_seed(3)
    net = nn.Linear(100, 70)
    return net, adamw(net.parameters())


def train(net, opts, steps):
    for _ in range(steps):
        net.zero_grad()
        net(torch.randn(8, 100)).square().mean().backward()
        for opt in opts:
            opt.step()


def save(path):
    net, opt = made()
    train(net, [opt], 60)
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
    train(net, [opt], 1)
    assert all(param.isfinite().all() for param in net.parameters())
    torch.save({"model": net.state_dict(), "optimizer": opt.state_dict()}, out)


def save_both(net, muon, adamw, path):
    both = {"muon": muon.state_dict(), "adamw": adamw.state_dict()}
    torch.save({"model": net.state_dict(), "optimizer": both}, path)


def save_muon(path):
    net, _ = made()
    opts = [torch.optim.Muon([("weight", net.weight)], lr=1e-3), adamw([("bias", net.bias)])]
    train(net, opts, 60)
    save_both(net, *opts, path)


def resume_muon(path, out):
    net, _ = made()
    saved = torch.load(path, weights_only=True)
    net.load_state_dict(saved["model"])
    opts = []
    for cls, key in [(torch.optim.Muon, "muon"), (torch.optim.AdamW, "adamw")]:
        names = saved["tch_amp"]["param_names"]["optimizer"][key]
        opts.append(cls([{"params": [getattr(net, name) for name in group]} for group in names]))
        opts[-1].load_state_dict(saved["optimizer"][key])
    state = opts[0].state[net.weight]
    assert set(state) - {"step"} == {"momentum_buffer"}, sorted(state)
    assert state["momentum_buffer"].shape == net.weight.shape and state["momentum_buffer"].any()
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert opts[1].state[net.bias]["step"] == 65
    train(net, opts, 1)
    assert all(param.isfinite().all() for param in net.parameters())
    save_both(net, *opts, out)


if __name__ == "__main__":
    commands = [save, resume, save_muon, resume_muon]
    {command.__name__: command for command in commands}[sys.argv[1]](*sys.argv[2:])
