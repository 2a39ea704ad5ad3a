"""Saves checkpoints with torch, and says what is in one. Run by oracle.rs."""

import collections
import io
import struct
import sys

import torch


class Dump:
    """A value as text, which oracle.rs writes in the same way. Storages are numbered as they come."""

    def __init__(self):
        self.storages = {}

    def tensor(self, t):
        t = t.detach()
        storage = t.untyped_storage()
        # An empty storage has no address, so every one counts as new.
        key = storage.data_ptr() or object()
        number = self.storages.setdefault(key, len(self.storages))
        # Element by element: contiguous() is not there for every dtype.
        raw = bytes(storage.tolist())
        size = t.element_size()
        places = [t.storage_offset()] if 0 not in t.shape else []
        for length, stride in zip(t.shape, t.stride()):
            places = [p + i * stride for p in places for i in range(length)]
        data = b"".join(raw[p * size : (p + 1) * size] for p in places)
        shape = ",".join(map(str, t.shape))
        stride = ",".join(map(str, t.stride()))
        return f"{t.dtype} {number}/{len(raw)}@{t.storage_offset()} [{shape}] [{stride}] {data.hex()}"

    def value(self, v):
        if isinstance(v, torch.Tensor):
            return f"<{self.tensor(v)} {v.requires_grad}>"
        if isinstance(v, dict):
            return "{" + "".join(f"{self.value(k)}:{self.value(x)};" for k, x in v.items()) + "}"
        if isinstance(v, list):
            return "[" + "".join(self.value(x) + ";" for x in v) + "]"
        if isinstance(v, tuple):
            return "(" + "".join(self.value(x) + ";" for x in v) + ")"
        if v is None or isinstance(v, bool):
            return str(v)
        if isinstance(v, int):
            return f"i{v}"
        if isinstance(v, float):
            return "f" + struct.pack(">d", v).hex()
        assert isinstance(v, (str, torch.device, torch.dtype)), type(v)
        return "s" + str(v).encode().hex()


def training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        for optimizer in (adam, plain, momentum):
            optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(momentum, 3)
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
    return {
        "model": model.state_dict(),
        "optimizer": adam.state_dict(),
        "sgd": plain.state_dict(),
        "momentum": momentum.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict() or scaler,
        "epoch": 3,
        "lr": 1e-3,
        "name": "x",
        "flags": [True, None],
        "nested": (1, (2, (3, ()), [4, {"five": 5}])),
        "täst 🦀 名": "ünicode\n",
    }


def tensors():
    base = torch.arange(24.0).reshape(4, 6)
    nan = torch.tensor([0x7F800001, -1, 0xFFC0DEAD - 2**32], dtype=torch.int32).view(torch.float32)
    with_attribute = torch.nn.Parameter(torch.ones(2))
    with_attribute.sharded = True
    return {
        "base": base,
        "transposed": base.t(),
        "sliced": base[1:3, ::2],
        "expanded": torch.ones(3).expand(5, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "empty_slice": base[4:],
        "nan": nan,
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "with_attribute": with_attribute,
        "size": base.shape,
        "cpu": torch.device("cpu"),
        "cuda": torch.device("cuda", 1),
        "dtype": torch.bfloat16,
        "big": [2**40, -(2**63), 2**63 - 1, -1, 255, 256, 65536, -129],
        "many": {f"key {i}": float(i) for i in range(2500)},
        "shared_list": [[1]] * 3,
    }


DTYPES = """uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16
float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz""".split()


def kinds():
    # bool takes only 0 and 1.
    raw = lambda name: [1, 0] if name == "bool" else list(range(1, 97))
    make = lambda name: torch.tensor(raw(name), dtype=torch.uint8).view(getattr(torch, name))
    return {name: make(name) for name in DTYPES}


def main():
    if sys.argv[1] == "make":
        folder = sys.argv[2]
        cases = {"training": training(), "tensors": tensors(), "kinds": kinds(), "bare": torch.ones(2)}
        for name, case in cases.items():
            for protocol in (2, 3, 4, 5):
                path = f"{folder}/{name}{protocol}.pt"
                torch.save(case, path, pickle_protocol=protocol)
                print(path, Dump().value(case))
        buffer = io.BytesIO()
        torch.save(training(), buffer)
        with open(f"{folder}/buffer.pt", "wb") as file:
            file.write(buffer.getvalue())
        print(f"{folder}/buffer.pt", Dump().value(training()))
    else:
        for mmap in (False, True):
            print(Dump().value(torch.load(sys.argv[2], mmap=mmap, weights_only=True)))


main()
