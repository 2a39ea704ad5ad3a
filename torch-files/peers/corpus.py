"""Writes files of every layout that torch has, and beside each what is in it.

    python corpus.py make FOLDER        writes the files with the torch of this Python; call it with several
    python corpus.py big FOLDER         writes a .pt and a .safetensors of 1 GB
    python corpus.py read FOLDER        prints which files torch.load reads with weights_only=True
    python corpus.py time FILE          prints the seconds and the peak memory in MB of reading a big file

Beside FILE, `FILE.json` lists the dtype, the shape and the CRC-32 of the elements of each tensor in it.
"""

import collections
import json
import os
import pickle
import sys
import time
import zlib

import torch

try:
    import numpy
except ImportError:
    numpy = None


class Own:
    """A class of a program, which only that program can load."""

    def __init__(self):
        self.weight = torch.ones(3)


def tensors(value):
    """Every tensor in a value, in the containers that a checkpoint has."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif numpy is not None and isinstance(value, numpy.ndarray):
        yield torch.from_numpy(value.copy())


def described(tensor):
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), zlib.crc32(data)]


def models():
    torch.manual_seed(0)
    nn = torch.nn
    yield "linear", nn.Linear(3, 2)
    yield "conv", nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3))
    yield "lstm", nn.LSTM(4, 5, 2)
    yield "transformer", nn.TransformerEncoderLayer(8, 2, 16)
    yield "embedding", nn.Sequential(nn.Embedding(11, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4))
    yield "double", nn.Linear(3, 2).double()
    yield "half", nn.Linear(3, 2).half()
    yield "bfloat16", nn.Linear(3, 2).bfloat16()


def optimizers(model):
    optim = torch.optim
    parameters = list(model.parameters())
    yield "sgd", optim.SGD(parameters, lr=0.1, momentum=0.9)
    yield "adamw", optim.AdamW(parameters, lr=0.1, amsgrad=True)
    yield "rmsprop", optim.RMSprop(parameters, lr=0.1, centered=True, momentum=0.5)
    yield "adagrad", optim.Adagrad(parameters, lr=0.1)


def objects():
    for name, model in models():
        yield f"model-{name}", model.state_dict()
        yield f"parameters-{name}", dict(model.named_parameters())
        yield f"nested-{name}", {"epoch": 3, "state_dict": model.state_dict(), "args": {"lr": 0.1, "names": ["a", None]}}
    model = torch.nn.Linear(3, 2)
    for name, optimizer in optimizers(model):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        yield f"optimizer-{name}", optimizer.state_dict()
        yield f"run-{name}", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    base = torch.arange(24.0).reshape(4, 6)
    yield "views", {"a": base, "t": base.t(), "row": base[1], "step": base[:, ::2], "expanded": base[0].expand(3, 6)}
    yield "shapes", {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "one": torch.ones(1, 1, 1)}
    integers = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
    yield "integers", {str(dtype): torch.ones(3, dtype=dtype) for dtype in integers}
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    yield "floats", {str(dtype): torch.ones(3, dtype=dtype) for dtype in floats}
    yield "complex", {"c64": torch.ones(2, dtype=torch.complex64), "c128": torch.ones(2, dtype=torch.complex128)}
    new = [getattr(torch, name, None) for name in ("float8_e5m2", "float8_e4m3fn", "uint16", "uint32", "uint64")]
    for dtype in filter(None, new):
        yield f"dtype-{dtype}", {"a": torch.ones(2, 3).to(dtype)}
    plain = {"a": torch.ones(3)}
    yield "counter", {**plain, "counts": collections.Counter(x=2)}
    yield "defaultdict", {**plain, "counts": collections.defaultdict(list, x=[1])}
    yield "set", {**plain, "names": {"x", "y"}}
    yield "numbers", {**plain, "big": 1 << 70, "negative": -(1 << 40), "float": float("inf"), "bytes": b"\xff"}
    yield "keys", {0: torch.ones(2), "ü": torch.zeros(2), None: 1, (1, 2): 3}
    yield "torch", {**plain, "size": torch.Size([1, 2]), "device": torch.device("cpu"), "dtype": torch.float16}
    yield "list", [torch.ones(2), {"b": torch.zeros(3)}]
    yield "tensor", torch.ones(2, 3)
    yield "sparse", {**plain, "s": torch.eye(3).to_sparse()}
    yield "quantized", {**plain, "q": torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)}
    yield "own", {**plain, "config": Own()}
    yield "conjugated", {**plain, "c": torch.ones(2, dtype=torch.complex64).conj()}
    if numpy is not None:
        yield "numpy", {**plain, "n": numpy.arange(6.0).reshape(2, 3), "scalar": numpy.float64(0.5)}
        yield "numpy-fortran", {**plain, "n": numpy.asfortranarray(numpy.arange(6, dtype="f4").reshape(2, 3))}


def keep(path, value):
    found = [described(tensor) for tensor in tensors(value)]
    with open(f"{path}.json", "w") as file:
        json.dump([one for one in found if one], file)


def make(folder):
    version = torch.__version__.split("+")[0]
    count = 0
    for name, value in objects():
        for layout in ("zip", "legacy"):
            for protocol in (2, 3, 4, 5):
                path = f"{folder}/{name}-{version}-{layout}-{protocol}.pt"
                torch.save(
                    value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=layout == "zip"
                )
                keep(path, value)
                count += 1
    for name, model in models():
        path = f"{folder}/script-{name}-{version}.pt"
        torch.jit.script(model).save(path)
        keep(path, dict(model.named_parameters()) | dict(model.named_buffers()))
        count += 1
    if numpy is not None:
        for protocol in (2, 3, 4, 5):
            value = {"a": numpy.arange(6.0).reshape(2, 3), "lr": 0.5}
            path = f"{folder}/plain-{version}-{protocol}.pkl"
            with open(path, "wb") as file:
                pickle.dump(value, file, protocol)
            keep(path, value)
            count += 1
    print(f"{count} files of torch {version}")


def big(folder):
    from safetensors.torch import save_file

    value = {f"layer.{i}.weight": torch.randn(1000, 6250) for i in range(40)}
    torch.save(value, f"{folder}/big.pt")
    save_file(value, f"{folder}/big.safetensors")


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1000


def timed(path):
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    start = time.perf_counter()
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        value = {name: tensor.clone() for name, tensor in load_file(path).items()}
    else:
        value = torch.load(path, weights_only=True)
    print(f"{time.perf_counter() - start:.3f} {status('VmHWM') - before:.0f} {len(value)}")


def read(folder):
    for name in sorted(os.listdir(folder)):
        if name.endswith(".json") or name.startswith("big"):
            continue
        try:
            value = torch.load(f"{folder}/{name}", weights_only=True)
            found = [described(tensor) for tensor in tensors(value)]
        except Exception as error:
            print(json.dumps([name, None, str(error).splitlines()[0][:80]]))
        else:
            print(json.dumps([name, [one for one in found if one], None]))


if __name__ == "__main__":
    action, argument = sys.argv[1:]
    {"make": make, "big": big, "read": read, "time": timed}[action](argument)
