"""Saves folders with torch.distributed.checkpoint, and says what is in one. Run by python.rs.

oracle.py make FOLDER: saves folders below it, one for each case, and prints each with its content.
oracle.py dump FOLDER: prints what Python reads of a folder, once by conversion to one file and once by `dcp.load`.
"""

import os
import pickle
import socket
import struct
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

warnings.filterwarnings("ignore")


def shown(v):
    """A value as text, which python.rs writes in the same way. Keys are texts, as in a folder."""
    if isinstance(v, torch.Tensor):
        v = v.detach().contiguous()
        # Element by element: there is no numpy.
        raw = bytes(v.reshape(-1).view(torch.uint8).tolist()) if v.numel() else b""
        return f"<{v.dtype} {list(v.shape)} {raw.hex()}>".replace(" ", "")
    if isinstance(v, dict):
        return "{" + "".join(f"{k}:{shown(x)};" for k, x in sorted((str(k), x) for k, x in v.items())) + "}"
    if isinstance(v, (list, tuple)):
        return "[" + "".join(shown(x) + ";" for x in v) + "]"
    if isinstance(v, float):
        return "f" + struct.pack(">d", v).hex()
    return str(v)


def training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def whole():
    model, optimizer = training()
    base = torch.randn(4, 6)
    nan = torch.tensor([0x7F800001, -1, 0xFFC0DEAD - 2**32], dtype=torch.int32).view(torch.float32)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": base.bfloat16(),
        "transposed": base.t(),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "sliced": base[1:3, ::2],
        "number": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "nan": nan,
        "fp16": torch.randn(3).half(),
        "bool": torch.tensor([True, False]),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "long": torch.tensor([2**40, -1]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "step": 7,
        "name": "täst",
        "flags": [True, None, 0.5],
        "pair": (1, (2.5, "x")),
        "list": [torch.ones(2), {"a": 1, "b": torch.zeros(1)}, [torch.full((1,), 3.0)]],
        "nested": {"deep": {"er": {"x": torch.ones(1), "y": 3}}},
        "rng": torch.get_rng_state()[:40],
    }


def sharded(rank, ranks):
    """The same tensors on any number of ranks: in rows, in columns, in a grid, unevenly, replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (ranks,))
    big, odd, cube = torch.randn(12, 8), torch.randn(7, 5), torch.randn(4, 6, 8)
    full = {
        "rows": big, "columns": big * 2, "halves": big.bfloat16(), "uneven": odd, "cube": cube, "few": torch.randn(1, 3),
        "wide": torch.randn(3, 40_000), "copies": odd * 3, "plain": odd + 1, "step": 3,
    }
    state = dict(full)
    for name, dim in [("rows", 0), ("columns", 1), ("halves", 0), ("uneven", 0), ("cube", 1), ("few", 0), ("wide", 1)]:
        state[name] = distribute_tensor(full[name], mesh, [Shard(dim)])
    # A shard of a transposed tensor is not in row-major order.
    full["strided"] = torch.randn(8, 12).t()
    state["strided"] = distribute_tensor(full["strided"], mesh, [Shard(0)])
    state["copies"] = distribute_tensor(full["copies"], mesh, [Replicate()])
    if ranks == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        full["grid"] = torch.randn(6, 10)
        state["grid"] = distribute_tensor(full["grid"], grid, [Shard(0), Shard(1)])
        full["twice"] = torch.randn(10, 2)
        state["twice"] = distribute_tensor(full["twice"], grid, [Shard(0), Shard(0)])
    return full, state


def work(rank, ranks, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    # Otherwise objects cannot be gathered without numpy.
    dist.distributed_c10d._tensor_to_object = lambda tensor, size, group: pickle.loads(bytes(tensor.tolist()[:size]))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    full, state = sharded(rank, ranks)
    dcp.save(state, checkpoint_id=folder)
    if rank == 0:
        print(folder, shown(full), flush=True)
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def make(folder):
    dcp.save(whole(), checkpoint_id=folder / "whole", no_dist=True)
    print(folder / "whole", shown(whole()), flush=True)
    model, optimizer = training()
    # As torchtitan saves: the model's names at the top, and a flat optimizer.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    state = {**model.state_dict(), "optimizer": flat, "train_state": {"step": torch.tensor(3)}}
    dcp.save(state, checkpoint_id=folder / "flat", no_dist=True)
    print(folder / "flat", shown(state), flush=True)
    for ranks in (1, 2, 4):
        arguments = (ranks, str(folder / f"ranks{ranks}"), free_port())
        torch.multiprocessing.spawn(work, arguments, nprocs=ranks)


def target(v):
    """Something of the same shapes to load into."""
    if isinstance(v, torch.Tensor):
        return torch.zeros_like(v)
    if isinstance(v, dict):
        return {k: target(x) for k, x in v.items()}
    if isinstance(v, list) and any(isinstance(x, (torch.Tensor, dict, list)) for x in v):
        return [target(x) for x in v]
    return None


def dump(folder):
    converted = folder.parent / (folder.name + ".pt")
    dcp_to_torch_save(folder, converted)
    found = torch.load(converted, weights_only=True)
    print(shown(found))
    loaded = target(found)
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    print(shown(loaded))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        dump(Path(sys.argv[2]))
