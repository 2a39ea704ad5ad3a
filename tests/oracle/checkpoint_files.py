"""Writes the files that Python programs have, for tests/files/checkpoint/files.rs and tests/files/checkpoint/unsupported.rs.

shapes FOLDER: writes a small model and what trains it in every shape in which programs, Lightning and transformers save
them, and prints what is in them as JSON.
unsupported FOLDER: writes files in which one entry is something that this crate does not support, or is in a way that
is not common, and prints the names of the entries, with `tensor` behind those that are tensors after all.
unsupported_dtypes FOLDER: the same for dtypes in safetensors.
parts_of_models FOLDER: writes models in several files, with other entries than tensors among the weights, and models of
TorchScript with objects that only TorchScript has.
edited FILE: puts other things in the places of the parts of FILE, which this crate wrote.
arrays FOLDER: writes numpy's arrays and numbers in pickles of each protocol, alone and in files of torch.save, and
prints the arrays as JSON.
others FOLDER: writes states in the forms of apex, diffusers and torch_ema, and averages that do not fit, and prints the
moments of the optimizer as JSON.
beside FILE: puts a weight beside the averages in the part `ema` of FILE, which this crate wrote.
average FILE: loads an AveragedModel from the part `ema` of FILE, which this crate wrote, and prints it after an update.
"""

import argparse
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import json
import pathlib
import pickle
import random
import struct
import sys
import types
import typing
import uuid
import warnings
import zipfile

import torch
from checkpoint import model
from torch import nn
from torch.optim import swa_utils


def trained():
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    for _ in range(2):
        opt.zero_grad()
        scaler.scale(net(torch.ones(1, 3)).sum()).backward()
        scaler.step(opt)
        scaler.update()
        schedule.step()
    return net, opt, schedule, scaler


def safetensors(path, tensors, metadata=None):
    """Writes tensors of torch, or pairs of a dtype and bytes, as the specification of the format says."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8"}
    header, body = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            dtype, shape = names[tensor.dtype], list(tensor.shape)
            data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        else:
            dtype, shape, data = tensor
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + body)


def lightning(net, opt, schedule, scaler):
    """The layout of Lightning's `dump_checkpoint`, of a module that holds the net as `net`."""
    return {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {f"net.{name}": tensor for name, tensor in net.state_dict().items()},
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.state_dict": {"_batches_that_stepped": 2},
                "epoch_progress": {"total": {"ready": 1, "completed": 0}, "current": {"ready": 1}},
            },
            "validate_loop": {"state_dict": {}},
        },
        "callbacks": {
            "ModelCheckpoint{'monitor': 'loss'}": {
                "monitor": "loss",
                "best_model_score": torch.tensor(0.25),
                "best_model_path": "a.ckpt",
                "best_k_models": {"a.ckpt": torch.tensor(0.25)},
            }
        },
        "optimizer_states": [opt.state_dict()],
        "lr_schedulers": [schedule.state_dict()],
        "MixedPrecision": scaler.state_dict(),
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.5, "widths": (3, 2)},
    }


def transformers(folder, net, opt, schedule, scaler):
    """The files of transformers' `Trainer`, and of `save_pretrained` with several shards."""
    torch.save(net.state_dict(), f"{folder}/pytorch_model.bin")
    torch.save(opt.state_dict(), f"{folder}/optimizer.pt")
    torch.save(schedule.state_dict(), f"{folder}/scheduler.pt")
    groups = {"model": net.state_dict(), "param_groups": opt.state_dict()["param_groups"]}
    torch.save(groups, f"{folder}/groups.pt")
    torch.save(scaler.state_dict(), f"{folder}/scaler.pt")
    torch.save({"python": (3, (1, 2), None), "cpu": torch.get_rng_state()}, f"{folder}/rng_state.pth")
    safetensors(f"{folder}/model.safetensors", net.state_dict(), {"format": "pt"})
    for ending, base in [("safetensors", "model"), ("bin", "pytorch_model")]:
        files = {}
        for number, (name, tensor) in enumerate(net.state_dict().items(), 1):
            files[name] = f"{base}-{number:05}-of-00002.{ending}"
            path = f"{folder}/{files[name]}"
            if ending == "bin":
                torch.save({name: tensor}, path)
            else:
                safetensors(path, {name: tensor}, {"format": "pt"})
        index = {"metadata": {"total_size": 32}, "weight_map": files}
        with open(f"{folder}/{base}.{ending}.index.json", "w") as file:
            json.dump(index, file, indent=2)


def averaged(net, updates):
    """A net with a norm, and an average of it."""
    wide = nn.Sequential(collections.OrderedDict(linear=copy.deepcopy(net), norm=nn.BatchNorm1d(2)))
    ema = swa_utils.AveragedModel(wide, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    for step in range(updates):
        with torch.no_grad():
            wide(torch.arange(6, dtype=torch.float32).view(2, 3) + step)
            wide.linear.weight.add_(1)
        ema.update_parameters(wide)
    return wide, ema


def steps(state, count):
    """The state of an AveragedModel as that of mmengine's, which has another name for the number of updates."""
    return {"steps": torch.tensor(count), **{name: state[name] for name in state if name != "n_averaged"}}


def mmengine(wide, ema):
    """What mmengine's EMAHook saves: it exchanges the averages and the weights."""
    weights = steps({f"module.{name}": tensor for name, tensor in wide.state_dict().items()}, 2)
    return {"state_dict": ema.module.state_dict(), "ema_state_dict": weights}


def shapes(folder):
    net, opt, schedule, scaler = trained()
    weights, zip_format = net.state_dict(), {"_use_new_zipfile_serialization": False}
    run = {"model": weights, "optimizer": opt.state_dict(), "scaler": scaler.state_dict(), "epoch": 3}
    wide, ema = averaged(net, 2)
    files = {
        "bare_model": weights,
        "bare_model_with_others": {**weights, "version": 3, "args": argparse.Namespace(lr=1), "classes": ["a", "b"]},
        "bare_model_with_tensors": {
            "mean": torch.tensor([0.25]), "cls_token": torch.arange(4) * 0.5, **{f"fc.{n}": t for n, t in weights.items()},
            "step": torch.tensor(3.0), "epoch": 3,
        },
        "run": run,
        "state_dict": {"state_dict": weights, "epoch": 3},
        "model_with_others": {"model": {**weights, "version": 3, "names": ["a"], "meta": {"q": (1, None)}, "f": b"x"}},
        "deep": {"checkpoint": {"last": run}, "kind": "run"},
        "prefixes": {"model": {f"module._orig_mod.{name}": tensor for name, tensor in weights.items()}},
        "lightning": lightning(net, opt, schedule, scaler),
        "two": {"optimizer_states": [opt.state_dict(), torch.optim.SGD(net.parameters(), lr=0.25).state_dict()]},
        "averaged": {"model": wide.state_dict(), "ema": ema.state_dict()},
        "bare_averaged": ema.state_dict(),
        "timm": {
            "epoch": 3, "arch": "x", "args": argparse.Namespace(lr=0.5), "version": 2, "metric": 0.5,
            "state_dict": wide.state_dict(), "state_dict_ema": ema.module.state_dict(),
            "optimizer": opt.state_dict(), "amp_scaler": scaler.state_dict(),
        },
        "deepspeed": {
            "module": weights, "optimizer": None, "lr_scheduler": None, "global_steps": 2, "ds_version": "0.16.0",
            "param_shapes": [collections.OrderedDict((name, tensor.shape) for name, tensor in weights.items())],
        },
        "steps": {"state_dict": wide.state_dict(), "ema_state_dict": steps(ema.state_dict(), 2)},
        "bad_steps": {"ema_state_dict": steps(ema.state_dict(), -1)},
        "mmengine": mmengine(wide, ema),
        "mmengine_amp": {
            "state_dict": weights,
            "optimizer": {**opt.state_dict(), "loss_scaler": scaler.state_dict()},
        },
        "not_averaged_yet": {"ema": averaged(net, 0)[1].state_dict()},
        "bare_tensor": net.weight.detach(),
        "list": [weights, 3],
    }
    for name, content in files.items():
        torch.save(content, f"{folder}/{name}.pt")
    for name in ["bare_model", "run", "lightning", "averaged", "bare_tensor"]:
        torch.save(files[name], f"{folder}/{name}.old.pt", **zip_format)
    half = {"a": torch.arange(6).view(2, 3).t().bfloat16(), "b": torch.arange(4).to(torch.complex64)}
    base = torch.arange(24, dtype=torch.float64)
    views = {"base": base, "part": base[4:9], "column": base.view(4, 6)[:, 2], "empty": base[:0], **half}
    torch.save({"model": views}, f"{folder}/views.old.pt", **zip_format)
    transformers(folder, net, opt, schedule, scaler)
    listed = lambda tensors: {name: tensor.tolist() for name, tensor in tensors.items()}
    state = opt.state_dict()["state"]
    content = {
        "weights": listed(weights),
        "buffers": {"weight": state[0]["momentum_buffer"].tolist(), "bias": state[1]["momentum_buffer"].tolist()},
        "lr": opt.param_groups[0]["lr"],
        "scaler": scaler.state_dict(),
        "averages": listed(ema.state_dict()),
        "views": {name: tensor.double().flatten().tolist() for name, tensor in views.items() if name != "b"},
    }
    with torch.no_grad():
        wide.linear.weight.add_(1)
    ema.update_parameters(wide)
    content["next averages"] = listed(ema.state_dict())
    print(json.dumps(content))


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Options:
    lr: float = 0.1


Pair = collections.namedtuple("Pair", "one two")


class Point(typing.NamedTuple):
    one: int
    two: float


class Old:
    """A tensor as PyTorch before 0.4 pickled it."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __reduce__(self):
        return torch._utils._rebuild_tensor, (self.tensor._typed_storage(), 0, tuple(self.tensor.shape), (1,))


class Subclass(torch.Tensor):
    pass


def numpy():
    """Functions that make what pickles as numpy's arrays, numbers and dtypes do, without numpy."""
    modules = {name: types.ModuleType(name) for name in ["numpy", "numpy._core.multiarray", "numpy._core.numeric"]}
    sys.modules.update(modules)

    def scalar(dtype, data):
        pass

    def _reconstruct(cls, shape, kind):
        pass

    def _frombuffer(data, dtype, shape, order):
        pass

    class dtype:
        def __init__(self, name, order="<"):
            self.name, self.order = name, order

        def __reduce__(self):
            return dtype, (self.name, False, True), (3, self.order, None, None, None, -1, -1, 0)

    class ndarray:
        def __init__(self, dtype, shape, data, is_fortran=False):
            self.dtype, self.shape, self.data, self.is_fortran = dtype, tuple(shape), data, is_fortran

        def __reduce_ex__(self, protocol):
            if protocol >= 5 and isinstance(self.data, bytes):
                content = bytearray(self.data) if self.data else self.data
                return _frombuffer, (content, self.dtype, self.shape, "F" if self.is_fortran else "C")
            state = (1, self.shape, self.dtype, self.is_fortran, self.data)
            return _reconstruct, (ndarray, (0,), b"b"), state

    class Number:
        def __init__(self, dtype, data):
            self.dtype, self.data = dtype, data

        def __reduce__(self):
            return scalar, (self.dtype, self.data)

    for function, name in [(scalar, "multiarray"), (_reconstruct, "multiarray"), (_frombuffer, "numeric")]:
        function.__module__, function.__qualname__ = f"numpy._core.{name}", function.__name__
        setattr(modules[function.__module__], function.__name__, function)
    for cls in [dtype, ndarray]:
        cls.__module__, cls.__qualname__ = "numpy", cls.__name__
        setattr(modules["numpy"], cls.__name__, cls)
    return dtype, ndarray, Number


def odd_numpy():
    dtype, ndarray, number = numpy()
    return {
        "numpy objects": ndarray(dtype("O8", "|"), (2,), [1, {"a": 2}]),
        "numpy byte order": ndarray(dtype("f4", ">"), (2,), bytes(8)),
        "numpy times": ndarray(dtype("M8"), (2,), bytes(16)),
        "numpy complex number": number(dtype("c8"), bytes(8)),
        "numpy list": [1.0, number(dtype("M8"), bytes(8))],
        "numpy dtype": dtype("f4"),
        "numpy class": ndarray,
        "numpy array tensor": ndarray(dtype("f4"), (2,), struct.pack("<2f", 1, 1)),
    }


def arrays(folder):
    dtype, ndarray, number = numpy()
    names = {
        torch.float32: "f4", torch.float64: "f8", torch.float16: "f2", torch.int64: "i8", torch.int32: "i4",
        torch.int16: "i2", torch.int8: "i1", torch.uint8: "u1", torch.bool: "b1", torch.complex64: "c8",
    }
    dtypes = {kind: dtype(name) for kind, name in names.items()}
    content = lambda tensor: bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    array = lambda tensor: ndarray(dtypes[tensor.dtype], tensor.shape, content(tensor))
    tensors = {name: ((torch.arange(6) - 2.0) / 4 * 30).to(kind).view(2, 3) for kind, name in names.items()}
    tensors["zeros"], tensors["single"] = torch.zeros(3), torch.tensor(0.75)
    model = {name: array(tensor) for name, tensor in tensors.items()}
    fortran = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    model["fortran"] = ndarray(dtypes[torch.float32], fortran.shape, content(fortran.permute(2, 1, 0)), True)
    model["empty"] = array(torch.zeros(0, 3))
    net = {name: array(tensor) for name, tensor in globals()["model"]().state_dict().items()}
    numbers = {"lr": number(dtype("f8"), struct.pack("<d", 0.1)), "step": number(dtype("i2"), b"\xfe\xff")}
    numbers |= {"f4": number(dtype("f4"), struct.pack("<f", 0.5)), "f2": number(dtype("f2"), struct.pack("<e", -1.5))}
    numbers |= {"flag": number(dtype("b1"), b"\x01"), "u1": number(dtype("u1"), b"\xff")}
    saved = {"arrays": model, "model": net, "numbers": numbers, "__author__": "x", "matching_heuristics": True}
    for protocol in (2, 3, 4, 5):
        with open(f"{folder}/{protocol}.pkl", "wb") as file:
            pickle.dump(saved, file, protocol)
        torch.save(saved, f"{folder}/{protocol}.pt", pickle_protocol=protocol)
        old = {"_use_new_zipfile_serialization": False}
        torch.save({**saved, "tensor": torch.ones(2)}, f"{folder}/{protocol}.old.pt", pickle_protocol=protocol, **old)
    with open(f"{folder}/tensors.pkl", "wb") as file:
        pickle.dump({"model": {"weight": torch.ones(2)}}, file)
    numpy_state = ("MT19937", ndarray(dtype("u4"), (624,), bytes(2496)), 624, 0, 0.0)
    states = {"random_state": random.getstate(), "numpy_random_seed": numpy_state}
    torch.save({**states, "torch_manual_seed": torch.get_rng_state()}, f"{folder}/random_states_0.pkl")
    with zipfile.ZipFile(f"{folder}/arrays.npz", "w") as file:
        file.writestr("weight.npy", b"\x93NUMPY\x01\x00" + bytes(120))
    tensors["fortran"], tensors["c8"] = fortran, torch.view_as_real(tensors["c8"])
    print(json.dumps({name: tensor.double().flatten().tolist() for name, tensor in tensors.items()}))


def with_attribute(tensor):
    tensor.note = "x"
    return tensor


def hooked():
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(print)
    return tensor


def recursive_tuple():
    items = []
    items.append((items, 1, 2, 3, 4))
    return items[0]


def recursive_list():
    items = []
    items.append(items)
    return items


def view_as(name, count=4):
    dtype = getattr(torch, name)
    return torch.ones(count * 8, dtype=torch.uint8).view(dtype)


def odd_values():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(2)))
    for _ in range(12):
        net = nn.Sequential(net)
    opt = torch.optim.Adam(net.parameters())
    names = "float8_e8m0fnu float4_e2m1fn_x2 bits8 bits16 bits1x8 bits2x4 bits4x2 uint16 uint32 uint64".split()
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.quint8)
    channels = torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    return {
        **{name: view_as(name) for name in names if hasattr(torch, name)},
        "quantized": quantized,
        "quantized channels": channels,
        "quantized int32": torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint32),
        "quantized parameter": nn.Parameter(quantized, requires_grad=False),
        "quantized list": [quantized, 1],
        "quantized with attribute": with_attribute(quantized.clone()),
        "sparse with attribute": with_attribute(torch.eye(2).to_sparse()),
        "meta with attribute": with_attribute(torch.ones(2, device="meta")),
        "quantized buffer": nn.Buffer(quantized.clone()),
        "long size": torch.Size(range(65)),
        "typed storage": torch.FloatStorage([1, 2]),
        "untyped storage": torch.UntypedStorage(4),
        "tuple keys": {("a", 1): 2},
        "tuple keys with tensors": {("a", 1): torch.ones(2), "b": torch.ones(2)},
        "tuple keys deep": {"a": [{(1, 2): 3}]},
        "bytes keys": {b"a": 1},
        "frozenset keys": {frozenset([1]): 1},
        "class keys": {Color.RED: 1, int: 2},
        "tensor keys": {torch.ones(1): 1},
        "sparse": torch.eye(2).to_sparse(),
        "csr": torch.eye(2).to_sparse_csr(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.ones(2, device="meta"),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "neg": torch.ones(2, dtype=torch.complex64).conj().imag,
        "hooked tensor": hooked(),
        "uninitialized": nn.UninitializedParameter(),
        "subclass": torch.ones(2).as_subclass(Subclass),
        "module": net,
        "module class": nn.Linear,
        "optimizer": opt,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, 3),
        "layout": torch.strided,
        "qscheme": torch.per_tensor_affine,
        "quantized dtype": torch.qint8,
        "small dtype": torch.uint4,
        "namespace": argparse.Namespace(lr=0.1, nested=argparse.Namespace(a=[1])),
        "simple namespace": types.SimpleNamespace(a=1),
        "dataclass": Options(),
        "enum": Color.RED,
        "named tuple": Pair(1, 2),
        "path": pathlib.PurePosixPath("/a/b"),
        "date": datetime.datetime(2024, 1, 2),
        "time zone": datetime.timezone.utc,
        "decimal": decimal.Decimal("1.5"),
        "uuid": uuid.UUID(int=5),
        "default dict": collections.defaultdict(list, {"a": [1]}),
        "deque": collections.deque([1, 2], maxlen=3),
        "chain map": collections.ChainMap({"a": 1}),
        "range": range(3),
        "slice": slice(1, 2),
        "function": torch.relu,
        "builtin": len,
        "partial": functools.partial(int, base=2),
        "method": "a".join,
        "ellipsis": ...,
        "bytes": b"ab",
        "empty bytes": b"",
        "long bytes": b"ab" * 300,
        "bytearray": bytearray(b"ab"),
        "set": {1, 2},
        "empty set": set(),
        "frozenset": frozenset([1]),
        "complex": 1j,
        "huge": 2**80,
        "huger": -(2**3000),
        "surrogate": "a\udcff",
        "surrogate key": {"a\udcff": 1},
        "deep": functools.reduce(lambda inner, _: [inner], range(80), 1),
        "recursive list": recursive_list(),
        "recursive tuple": recursive_tuple(),
        "error": ValueError("x"),
        "exception in a list": [1, {"a": KeyError("b")}],
        **odd_numpy(),
        # Tensors in ways that are not common.
        "buffer tensor": nn.Buffer(torch.ones(2)),
        "attribute tensor": with_attribute(torch.ones(2)),
        "old tensor": Old(torch.ones(2)),
        "parameter tensor": nn.Parameter(torch.ones(2)),
        "lone parameter tensor": nn.Parameter(with_attribute(torch.ones(2))),
    }


def unsupported(folder):
    weights = model().state_dict()
    for name, value in odd_values().items():
        for protocol in (2, 3, 4, 5):
            way = {"pickle_protocol": protocol}
            path = f"{folder}/{name}.{protocol}"
            torch.save({"model": weights, "seed": 7, "other": value}, f"{path}.beside.pt", **way)
            torch.save({"model": {**weights, "other": value}, "seed": 7}, f"{path}.within.pt", **way)
            torch.save({**weights, "other": value, "seed": 7}, f"{path}.bare.pt", **way)
        print(name)


def unsupported_dtypes(folder):
    weights = model().state_dict()
    for dtype, size in [("F8_E8M0", 4), ("U16", 8), ("U32", 16), ("U64", 32), ("F4", 2), ("F6_E2M3", 3), ("NEW", 5)]:
        # The names of the weights are on both sides of the other's.
        tensors = {"bias": weights["bias"], "other": (dtype, [4], b"\x01" * size), "weight": weights["weight"]}
        safetensors(f"{folder}/{dtype}.safetensors", tensors)
        print(dtype)


class Scripted(nn.Module):
    """A module with attributes of classes that TorchScript has for itself."""

    pair: Point

    def __init__(self):
        super().__init__()
        self.linear, self.color, self.pair = model(), Color.RED, Point(1, 2.0)

    def forward(self, x):
        return self.linear(x) * self.pair.one if self.color == Color.RED else x


def parts_of_models(folder):
    weights = model().state_dict()
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.quint8)
    torch.jit.save(torch.jit.script(Scripted()), f"{folder}/scripted.pt")
    engines = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = next(name for name in engines if name != "none")
    part = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear})
    torch.jit.save(torch.jit.script(nn.Sequential(model(), part)), f"{folder}/quantized.pt")
    one = torch.ones(1)
    odd = {"other": quantized, "named.other": quantized, "step": 3, "state": {"x": 1, "y": one}, "model": one}
    shards = {
        "together": [{**weights, **odd}],
        "alone": [weights, *[{name: value} for name, value in odd.items()]],
        # Without a name from which one could tell that it is a model.
        "apart": [{"cls_token": weights["weight"], **odd}, {"weight": weights["weight"], "bias": weights["bias"]}],
    }
    for name, contents in shards.items():
        files = {}
        for number, content in enumerate(contents):
            torch.save(content, f"{folder}/{name}-{number}.bin")
            files.update(dict.fromkeys(content, f"{name}-{number}.bin"))
        with open(f"{folder}/{name}.bin.index.json", "w") as file:
            json.dump({"weight_map": files}, file, indent=2)


def edited(path):
    """Puts other things in the places of the parts that this crate has saved."""
    saved = torch.load(path, weights_only=True)
    saved["model"]["other"] = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.quint8)
    saved["optimizer"] = torch.optim.Adamax(model().parameters()).state_dict()
    saved["scaler"], saved["step"], saved["mean"] = None, torch.tensor(5.0), {1, 2}
    saved["with others"].update({"module.other": saved["model"]["other"], "module.note": "x"})
    saved["updated"]["n_averaged"] += 1
    torch.save(saved, path)


def fused_adam(opt, **options):
    """The state of an AdamW as apex's FusedAdam saves it: with one number of steps for each group, and neither
    `amsgrad` nor which of Adam and AdamW it is."""
    saved = opt.state_dict()
    kept = ("lr", "betas", "eps", "weight_decay", "params")
    groups = [{key: group[key] for key in kept} for group in saved["param_groups"]]
    for group in groups:
        group.update({"bias_correction": True, "step": 2, **options})
    state = {i: {key: state[key] for key in ("exp_avg", "exp_avg_sq")} for i, state in saved["state"].items()}
    return {"state": state, "param_groups": groups}


def others(folder):
    net = model()
    opt = torch.optim.AdamW(net.parameters(), lr=0.25, betas=(0.5, 0.75), weight_decay=0.125)
    for _ in range(2):
        opt.zero_grad()
        net(torch.ones(1, 3)).square().sum().backward()
        opt.step()
    moments = {name: {key: opt.state[tensor][key].tolist() for key in ("exp_avg", "exp_avg_sq")}
               for name, tensor in net.named_parameters()}
    tensor = torch.tensor(2, dtype=torch.int32)
    files = {
        "fused_adam": fused_adam(opt),
        "fused_adam_on_device": fused_adam(opt, step=tensor, lr=torch.tensor(0.25)),
        "deepspeed": fused_adam(opt, step=0),
        "without_correction": fused_adam(opt, bias_correction=False),
        "fused_lamb": fused_adam(opt, grad_averaging=True, max_grad_norm=1.0),
        "amp": {"amp": {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}},
        "two_amps": {"amp": {f"loss_scaler{i}": {"loss_scale": 2.0 ** i, "unskipped": i} for i in range(2)}},
    }
    for i, state in files["deepspeed"]["state"].items():
        state["step"] = 2 * i  # it counts those of the last parameter
    wide, ema = averaged(model(), 2)
    listed = list(ema.module.parameters())
    options = {"decay": 0.5, "min_decay": 0.0, "update_after_step": 0, "use_ema_warmup": False, "inv_gamma": 1.0}
    files["diffusers"] = {"ema": {**options, "power": 2 / 3, "optimization_step": 2, "shadow_params": listed}}
    files["torch_ema"] = {"ema": {"decay": 0.5, "num_updates": 2, "shadow_params": listed, "collected_params": None}}
    state = ema.state_dict()
    large = {**state, "module.norm.running_var": torch.tensor([1e5, 2.0])}
    files["large"] = {"ema": large}
    twice = {**state, "linear.weight": torch.zeros(2, 3)}
    files["twice"] = {"n_averaged": twice, "steps": steps(twice, 2)}
    for name, content in files.items():
        torch.save(content, f"{folder}/{name}.pt")
    print(json.dumps(moments))


def beside(path):
    saved = torch.load(path, weights_only=True)
    saved["ema"]["linear.weight"] = torch.zeros(2, 3)
    torch.save(saved, path)


def average(path):
    saved = torch.load(path, weights_only=True)["ema"]
    wide = nn.Sequential(collections.OrderedDict(linear=model(), norm=nn.BatchNorm1d(2)))
    ema = swa_utils.AveragedModel(wide, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    ema.load_state_dict(saved)
    before = {name: tensor.tolist() for name, tensor in ema.state_dict().items()}
    ema.update_parameters(wide)
    print(json.dumps([before, {name: tensor.tolist() for name, tensor in ema.state_dict().items()}]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    commands = [shapes, unsupported, unsupported_dtypes, parts_of_models, edited, others, beside, average, arrays]
    {command.__name__: command for command in commands}[sys.argv[1]](*sys.argv[2:])
