"""Opens files with weights as Python programs do, for tests/files/checkpoint/weights.rs.

read FILE: prints the name, dtype, shape and bytes of each tensor, by torch.load, torch.jit.load, or the specification
of safetensors.
strict FILE: loads FILE into a module with a norm, all of whose names must be there, and prints its output.
"""

import json
import struct
import sys

import torch
from torch import nn


def safetensors(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        body = file.read()
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for info in sorted(header.values(), key=lambda info: info["data_offsets"]):
        assert info["data_offsets"][0] == end
        end = info["data_offsets"][1]
    assert end == len(body)
    dtypes = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}
    dtypes |= {"I64": torch.int64, "BOOL": torch.bool}
    tensors = {}
    for name, info in header.items():
        start, end = info["data_offsets"]
        data = bytearray(body[start:end])
        dtype = dtypes[info["dtype"]]
        tensor = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensors[name] = tensor.reshape(info["shape"])
    return tensors


def load(path):
    if path.endswith(".safetensors"):
        return safetensors(path)
    if path.endswith(".ot"):
        return {name.replace("|", "."): tensor for name, tensor in torch.jit.load(path).state_dict().items()}
    tensors = torch.load(path, weights_only=True)
    assert type(tensors) is dict
    return tensors


def read(path):
    for name, tensor in sorted(load(path).items()):
        assert not tensor.requires_grad
        data = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""
        print(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data.hex())


def strict(path):
    body = nn.Sequential()
    body.add_module("conv", nn.Conv2d(1, 2, 1))
    body.add_module("norm", nn.BatchNorm2d(2))
    net = nn.ModuleDict({"body": body})
    net.load_state_dict(load(path))
    net.eval()
    with torch.no_grad():
        out = net["body"](torch.arange(4, dtype=torch.float32).view(1, 1, 2, 2))
    print(*[number.hex() for number in out.flatten().tolist()])


if __name__ == "__main__":
    {"read": read, "strict": strict}[sys.argv[1]](sys.argv[2])
