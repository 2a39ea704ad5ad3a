"""Saves and loads checkpoints as a Python program does, for tests/files/checkpoint/python.rs.

save FOLDER: trains a little and writes FOLDER/ALGORITHM.pt for each optimizer, and prints for each the losses of the
next steps as hexadecimal floats.
resume FOLDER: loads each FOLDER/ALGORITHM.pt as this crate wrote it, into model, optimizer and scaler, for optimizers
that are built in several ways, and prints some values and the next losses.
state FOLDER: reads FOLDER/rust.pt, which has states of the program's own, prints them, and writes FOLDER/python.pt with
others.
save_norm FILE, load_norm FILE: a model with a norm, whose running variances are printed.
golden FILE: writes what tests/files/checkpoint/golden.rs expects.
odd FOLDER: writes files with what Python programs save besides.
others FILE: writes the states of all optimizers that this crate lacks, and prints their names.
options FOLDER: gives the options of each optimizer in FOLDER/rust.pt to the class that its name begins with, and writes
the states of the new optimizers to FOLDER/python.pt.
save_muon FOLDER: trains a little with Muon and AdamW, writes their states with and without names, and prints the
losses of the next steps.
resume_muon FOLDER: loads FOLDER/rust.pt as this crate wrote it into Muon and AdamW, writes their states without names
and with other learning rates, and prints the losses of the next steps.
by_name FOLDER: loads FOLDER/rust.pt, in which this crate wrote each optimizer by names, and prints the next losses;
trains a little with each optimizer, prints the losses of the next steps, and writes what torch.distributed.checkpoint
makes of them: the folder FOLDER/dcp, FOLDER/dcp.pt, which PyTorch makes of that, and FOLDER/flat.pt. FOLDER/odd.pt has
states with other names and with tensors among the options.
version: prints PyTorch's.
safe FILE: reads a safetensors file with nothing but its specification and prints what is in it.
"""

import inspect
import sys

import torch
from torch import nn

STEPS = 4
NAMES = ["adamw", "adam", "sgd", "plain", "adagrad", "rmsprop", "nadam", "adafactor"]
WAYS = [{"fused": True}, {}, {"foreach": True}, {"fused": False}]


def optimizer(name, net, **way):
    groups = [{"params": [net.weight]}, {"params": [net.bias], "weight_decay": 0.0}]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.05, amsgrad=True, **way)
    if name == "adam":
        return torch.optim.Adam(groups, lr=0.05, weight_decay=0.1, **way)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1, **way)
    if name == "plain":
        return torch.optim.SGD(groups, lr=0.05, **way)
    if name == "rmsprop":
        way = {key: value for key, value in way.items() if key != "fused"}
        return torch.optim.RMSprop(groups, lr=0.05, momentum=0.5, centered=True, weight_decay=0.1, **way)
    if name == "nadam":
        return torch.optim.NAdam(groups, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True, foreach=False)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=0.05, weight_decay=0.1, foreach=False)
    return torch.optim.Adagrad(groups, lr=0.05, lr_decay=0.1, **way)


def data():
    return torch.arange(12, dtype=torch.float32).view(4, 3) / 8 - 0.5


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)


def train(net, opt, scale, steps, overflow=()):
    losses = []
    for step in range(steps):
        loss = net(data()).square().mean()
        opt.zero_grad()
        scale.scale(loss * (float("inf") if step in overflow else 1.0)).backward()
        scale.step(opt)
        scale.update()
        losses.append(loss.item().hex())
    return losses


def model():
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.copy_(torch.arange(6, dtype=torch.float32).view(2, 3) / 4)
        net.bias.copy_(torch.tensor([0.5, -0.5]))
    return net


def before_2_7(state):
    """Without what tells an AdamW from an Adam."""
    if "amsgrad" not in state["param_groups"][0]:
        return state
    groups = [{k: v for k, v in g.items() if k != "decoupled_weight_decay"} for g in state["param_groups"]]
    return {**state, "param_groups": groups}


def save(folder):
    for name in NAMES:
        net = model()
        opt, scale = optimizer(name, net, fused=True), scaler()
        train(net, opt, scale, 5, overflow=(2,))
        content = {
            "model": net.state_dict(),
            "optimizer": opt.state_dict(),
            "scaler": scale.state_dict(),
            "epoch": 3,
            "lr": 1e-3,
            "history": [(1, "a"), None],
            "best": float("inf"),
            "rng": torch.get_rng_state(),
            "unknown": {"deep": [torch.ones(2)]},
            "adamax": torch.optim.Adamax(net.parameters()).state_dict(),
            "old": before_2_7(opt.state_dict()),
        }
        torch.save(content, f"{folder}/{name}.pt")
        print(name, *train(net, opt, scale, STEPS))
    torch.save(model().state_dict(), f"{folder}/model.pt")


def resume(folder):
    for name in NAMES:
        for way in WAYS:
            resume_one(f"{folder}/{name}.pt", name, way)


def resume_one(path, name, way):
    content = torch.load(path, weights_only=True)
    torch.load(path, weights_only=True, mmap=True)
    net = nn.Linear(3, 2)
    opt, scale = optimizer(name, net, **way), scaler()
    net.load_state_dict(content["model"])
    opt.load_state_dict(content["optimizer"])
    scale.load_state_dict(content["scaler"])
    torch.set_rng_state(content["rng"])
    values = [content[key] for key in ["epoch", "text", "list", "none", "floats"]]
    print(*values, end=": ")
    print(*train(net, opt, scale, STEPS, overflow=(1,)))
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def state(folder):
    saved = torch.load(f"{folder}/rust.pt", weights_only=True)
    print({**saved["ema"], "w": saved["ema"]["w"].tolist()}, saved["decay"], saved["loss_scale"])
    net = model()
    schedule = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(net.parameters(), lr=0.5), 0.5)
    ema = {"updates": 4, "w": torch.tensor([0.25, 0.5])}
    decay = {"lr": schedule.get_last_lr()[0], "epoch": schedule.state_dict()["last_epoch"]}
    torch.save({"ema": ema, "decay": decay, "schedule": schedule.state_dict()}, f"{folder}/python.pt")


def norm():
    return nn.ModuleDict({"features": nn.ModuleDict({"norm": nn.BatchNorm2d(2)})})


def save_norm(path):
    net = norm()
    inner = net["features"]["norm"]
    inner(torch.arange(16, dtype=torch.float32).view(2, 2, 2, 2) / 8)
    torch.save({"model": net.state_dict()}, path)
    print(inner.running_var.tolist())


def load_norm(path):
    saved = torch.load(path, weights_only=True)["model"]
    net = norm()
    assert set(saved) == set(net.state_dict())
    net.load_state_dict(saved, strict=True)
    print(net["features"]["norm"].running_var.tolist())


def odd(folder):
    """Files with what Python programs save besides."""
    net = model()
    weights = net.state_dict()
    base = torch.optim.SGD(net.parameters(), lr=0.1)
    others = {
        "counter": torch.optim.lr_scheduler.MultiStepLR(base, [2, 5]).state_dict(),
        "bytes": b"ab",
        "bytearray": bytearray(b"ab"),
        "set": {1, 2},
        "complex": 1j,
        "uint16": torch.ones(2, dtype=torch.uint16),
        "sparse": torch.eye(2).to_sparse(),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "huge": 2**80,
        "radam": torch.optim.RAdam(net.parameters(), decoupled_weight_decay=True).state_dict(),
        "nadam": torch.optim.NAdam(net.parameters()).state_dict(),
    }
    for name, other in others.items():
        torch.save({"model": weights, "seed": 2**64 - 1, "other": other}, f"{folder}/{name}.pt")
    torch.save(weights, f"{folder}/12:30:00.pt")
    torch.save({**weights, "_extra_state": None}, f"{folder}/extra.pt")
    torch.save({"a/b": torch.ones(2), "config": {}, "model": nn.Identity().state_dict()}, f"{folder}/slash.pt")
    step = torch.tensor([3])
    opt = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.25), amsgrad=False)
    state = opt.state_dict()
    for index, parameter in enumerate(net.parameters()):
        zeros = torch.zeros_like(parameter)
        # Older versions of PyTorch keep the step as a number.
        steps = step if index == 0 else 3
        state["state"][index] = {"step": steps, "exp_avg": zeros, "exp_avg_sq": zeros}
    torch.save({"optimizer": state}, f"{folder}/tensors.pt")


def others(path):
    weight = [nn.Parameter(torch.ones(2, 2))]
    built = {}
    for decoupled in [False, True]:
        built[f"RAdam {decoupled}"] = torch.optim.RAdam(weight, weight_decay=0.1, decoupled_weight_decay=decoupled)
    for name in ["Adadelta", "Adamax", "ASGD", "LBFGS", "Rprop", "SparseAdam"]:
        built[name] = getattr(torch.optim, name)(weight)
    torch.save({name: opt.state_dict() for name, opt in built.items()}, path)
    print(*built, sep="\n")


class Lion(torch.optim.Optimizer):
    """The options of its authors' implementation, and `maximize`."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})


def options(folder):
    states = {}
    for name, state in torch.load(f"{folder}/rust.pt", weights_only=True).items():
        if "param_groups" not in state:
            continue
        cls = Lion if name.startswith("Lion") else getattr(torch.optim, name.split(" ")[0])
        (group,) = state["param_groups"]
        accepted = {key: group[key] for key in inspect.signature(cls).parameters if key in group and key != "params"}
        opt = cls([("w", nn.Parameter(torch.ones(1)))], **accepted)
        states[name] = opt.state_dict()
    torch.save(states, f"{folder}/python.pt")


def muon_model():
    net = nn.ModuleDict({"hidden": nn.Linear(3, 4, bias=False), "head": nn.Linear(4, 2)})
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(ramp(-0.5, *param.shape))
    return net


def train_muon(net, opts, steps):
    losses = []
    for _ in range(steps):
        loss = net["head"](net["hidden"](data())).square().mean()
        for opt in opts:
            opt.zero_grad()
        loss.backward()
        for opt in opts:
            opt.step()
        losses.append(loss.item().hex())
    return losses


def muon_and_adamw(hidden, head):
    muon = torch.optim.Muon(hidden, lr=0.1, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(head, lr=0.02, weight_decay=0.5, fused=True)


def save_muon(folder):
    for name in ["plain", "named"]:
        net = muon_model()
        parts = [list(net[key].named_parameters(prefix=key)) for key in ("hidden", "head")]
        if name == "plain":
            parts = [[param for _, param in part] for part in parts]
        opts = muon_and_adamw(*parts)
        train_muon(net, opts, 3)
        both = {"muon": opts[0].state_dict(), "adamw": opts[1].state_dict()}
        torch.save({"model": net.state_dict(), "optimizer": both, **both}, f"{folder}/{name}.pt")
    print(*train_muon(net, opts, STEPS))


def resume_muon(folder):
    saved = torch.load(f"{folder}/rust.pt", weights_only=True)
    net = muon_model()
    net.load_state_dict(saved["model"])
    named = dict(net.named_parameters())
    opts = []
    for cls, key in [(torch.optim.Muon, "muon"), (torch.optim.AdamW, "adamw")]:
        names = saved["tch_amp"]["param_names"]["optimizer"][key]
        opts.append(cls([{"params": [named[name] for name in group]} for group in names]))
        opts[-1].load_state_dict(saved["optimizer"][key])
    print(*train_muon(net, opts, STEPS))
    for factor in (1.0, 0.5):
        for group in opts[1].param_groups:
            group["lr"] *= factor
        both = {"muon": opts[0].state_dict(), "adamw": opts[1].state_dict()}
        torch.save({"model": net.state_dict(), "optimizer": both}, f"{folder}/python-{factor}.pt")
    print(*train_muon(net, opts, STEPS))


def with_names(state, names):
    """A state of an optimizer with names in the place of numbers."""
    groups = [{**group, "params": [names[n] for n in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[n]: tensors for n, tensors in state["state"].items()}, "param_groups": groups}


def by_name(folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    content = torch.load(f"{folder}/rust.pt", weights_only=True)
    for name in NAMES:
        net = nn.Linear(3, 2)
        opt, scale = optimizer(name, net, fused=True), scaler()
        net.load_state_dict(content[f"{name} model"])
        set_optimizer_state_dict(net, opt, content[f"{name} optimizer"])
        scale.load_state_dict(content[f"{name} scaler"])
        print(f"rust {name}", *train(net, opt, scale, STEPS), sep=",")
    for name in NAMES:
        net = nn.Linear(3, 2)
        opt, scale = optimizer(name, net, fused=True), scaler()
        state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, opt), "scaler": scale.state_dict()}
        state = {f"{name} {part}": content for part, content in state.items()}
        dcp.load(state, checkpoint_id=f"{folder}/rust.dcp", no_dist=True)
        net.load_state_dict(state[f"{name} model"])
        set_optimizer_state_dict(net, opt, state[f"{name} optimizer"])
        scale.load_state_dict(state[f"{name} scaler"])
        print(f"dcp {name}", *train(net, opt, scale, STEPS), sep=",")
    dcp_to_torch_save(f"{folder}/rust.dcp", f"{folder}/converted.pt")
    trained, contents = {}, {}
    for name in NAMES:
        net = model()
        opt, scale = optimizer(name, net, fused=True), scaler()
        train(net, opt, scale, 5, overflow=(2,))
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        trained[name] = (net, opt, scale)
        contents[name] = {
            "model": net.state_dict(),
            "scaler": scale.state_dict(),
            "optim": get_optimizer_state_dict(net, opt),
            "flat": get_optimizer_state_dict(net, opt, options=flat),
            "numbers": opt.state_dict(),
        }
    dcp.save(contents, checkpoint_id=f"{folder}/dcp", no_dist=True)
    dcp_to_torch_save(f"{folder}/dcp", f"{folder}/dcp.pt")
    torch.save(get_optimizer_state_dict(*trained["adamw"][:2], options=flat), f"{folder}/flat.pt")
    net, opt, scale = trained["adamw"]
    state = opt.state_dict()
    wrapped = with_names(state, ["module._orig_mod.weight", "module._orig_mod.bias"])
    misspelled = with_names(state, ["weight", "bias"])
    misspelled["state"]["wieght"] = misspelled["state"].pop("weight")
    mixed = {"state": {}, "param_groups": [{**state["param_groups"][0], "params": ["weight", 1]}]}
    beside = with_names(state, ["weight", "bias"])
    for group in beside["param_groups"]:
        group["param_names"] = [f"inner.{name}" for name in group["params"]]
    tensors = opt.state_dict()
    for group in tensors["param_groups"]:
        group["lr"] = torch.tensor(0.05)
        group["betas"] = (torch.tensor(0.75), torch.tensor([0.9], dtype=torch.float64))
        group["eps"], group["amsgrad"] = torch.tensor(1e-8, dtype=torch.float64), torch.tensor(True)
    odd = {
        "model": {name: tensor.clone() for name, tensor in net.state_dict().items()},
        "scaler": scale.state_dict(),
        "wrapped": wrapped,
        "unknown": with_names(state, ["weigth", "bias"]),
        "missing": {"state": {}, "param_groups": [beside["param_groups"][0]]},
        "misspelled": misspelled,
        "mixed": mixed,
        "beside": beside,
        "tensors": tensors,
    }
    torch.save(odd, f"{folder}/odd.pt")
    for name, (net, opt, scale) in trained.items():
        if name != "adamw":
            print(name, *train(net, opt, scale, STEPS), sep=",")
    net, opt, scale = trained["adamw"]
    saved = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    print("adamw", *train(net, opt, scale, STEPS), sep=",")
    # The same steps with the options that are tensors in the file.
    net.load_state_dict(saved)
    numbers = torch.load(f"{folder}/odd.pt", weights_only=True)
    for group in numbers["tensors"]["param_groups"]:
        group.update({key: group[key].item() for key in ["lr", "eps", "amsgrad"]})
        group["betas"] = tuple(beta.item() for beta in group["betas"])
    opt.load_state_dict(numbers["tensors"])
    scale.load_state_dict(numbers["scaler"])
    print("tensors", *train(net, opt, scale, STEPS), sep=",")


def safe(path):
    import json
    import struct

    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        body = file.read()
    ours = json.loads(header.pop("__metadata__")["tch_amp"])
    scale = scaler()
    scale.load_state_dict(ours["parts"]["scaler"]["state"])
    print(scale.state_dict())
    best = ours["parts"]["best"]
    print("best", float(best["value"]), best["non_finite"])
    for name, info in sorted(header.items()):
        start, end = info["data_offsets"]
        print(name, info["dtype"], info["shape"], body[start:end].hex())


def ramp(start, *shape):
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) / 8 + start).view(shape)


def golden(path):
    net = nn.ModuleDict({"linear": nn.Linear(3, 2)})
    with torch.no_grad():
        net["linear"].weight.copy_(ramp(-0.25, 2, 3))
        net["linear"].bias.copy_(ramp(1.0, 2))
    groups = [{"params": [net["linear"].weight]}, {"params": [net["linear"].bias], "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=0.01)
    state = opt.state_dict()
    for index, shape in enumerate([(2, 3), (2,)]):
        start = index + 1.0
        moments = {"exp_avg": ramp(-start, *shape), "exp_avg_sq": ramp(start, *shape)}
        state["state"][index] = {"step": torch.tensor(start + 4.0), **moments}
    opt.load_state_dict(state)
    scale = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    scale.load_state_dict({**scale.state_dict(), "scale": 16.0, "_growth_tracker": 2})
    content = {
        "model": net.state_dict(),
        "optimizer": opt.state_dict(),
        "scaler": scale.state_dict(),
        "value": (7, "ä", 0.1),
        # Some with strides or an offset.
        "Half": ramp(-1.0, 3, 5).half().t().contiguous().t(),
        "BFloat16": torch.stack([ramp(0.0, 3, 5), ramp(-1.0, 3, 5)]).bfloat16()[1],
        "Double": ramp(-1.0, 3, 5).double(),
        "Int64": ramp(-1.0, 3, 5).long(),
        "Float8e4m3fn": ramp(-1.0, 3, 5).to(torch.float8_e4m3fn),
    }
    torch.save(content, path)


def version():
    print(".".join(torch.__version__.split(".")[:2]))


if __name__ == "__main__":
    commands = [save, resume, state, save_norm, load_norm, golden, odd, others, options, version, safe, save_muon]
    commands += [resume_muon, by_name]
    {command.__name__: command for command in commands}[sys.argv[1]](*sys.argv[2:])
