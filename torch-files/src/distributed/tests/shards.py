"""Saves folders of safetensors shards with torch.distributed.checkpoint, and says what is in one. Run by python.rs.

shards.py make FOLDER: saves folders below it, one for each case, and prints each with its content.
shards.py dump FOLDER...: prints what Python's reader finds in each folder.
"""

import json
import os
import pickle
import struct
import sys
import types
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from oracle import free_port, sharded, shown

warnings.filterwarnings("ignore")

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


class Opened:
    """What PyTorch uses of `safe_open`."""

    def __init__(self, filename, framework):
        with open(filename, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self.header = json.loads(file.read(length))
            self.data = file.read()
        self.texts = self.header.pop("__metadata__", None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def keys(self):
        return list(self.header)

    def metadata(self):
        return self.texts

    def get_slice(self, name):
        return Slice(self.header[name], self.data)


class Slice:
    def __init__(self, entry, data):
        self.entry, self.data = entry, data

    def get_shape(self):
        return self.entry["shape"]

    def get_dtype(self):
        return self.entry["dtype"]

    def __getitem__(self, slices):
        start, end = self.entry["data_offsets"]
        dtype = DTYPES[self.entry["dtype"]]
        if start == end:
            return torch.empty(self.entry["shape"], dtype=dtype)[slices]
        raw = torch.frombuffer(bytearray(self.data[start:end]), dtype=torch.uint8)
        return raw.view(dtype).reshape(self.entry["shape"])[slices]


def save(tensors, metadata):
    header, data = {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        assert tensor.is_contiguous(), name
        (dtype,) = (key for key, dtype in DTYPES.items() if dtype == tensor.dtype)
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


def provide_safetensors():
    """PyTorch's reader and writer need the package `safetensors`, and that needs numpy, which are not there."""
    package, module = types.ModuleType("safetensors"), types.ModuleType("safetensors.torch")
    package.safe_open, package.torch, module.save = Opened, module, save
    module._getdtype = DTYPES.__getitem__
    sys.modules.update({"safetensors": package, "safetensors.torch": module})


provide_safetensors()


def tensors_only(state):
    """The writer has no place for anything else, nor for tensors with other strides."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and name != "strided"}


def work(rank, ranks, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    # Otherwise objects cannot be gathered without numpy.
    dist.distributed_c10d._tensor_to_object = lambda tensor, size, group: pickle.loads(bytes(tensor.tolist()[:size]))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    full, state = sharded(rank, ranks)
    full, state = tensors_only(full), tensors_only(state)
    two_files = {name: 1 + place % 2 for place, name in enumerate(full)}
    for case, options in [
        ("one", {}),
        ("two", {"fqn_to_index_mapping": two_files}),
        ("whole", {"fqn_to_index_mapping": two_files, "enable_consolidation": True}),
    ]:
        path = f"{folder}-{case}"
        writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True, **options)
        dcp.save(state, storage_writer=writer)
        if rank == 0:
            paths = [path, f"{path}/sharded"] if case == "whole" else [path]
            for path in paths:
                print(path, shown(full), flush=True)
        dist.barrier()
    dist.destroy_process_group()


def make(folder):
    dtypes = {}
    for name, dtype in DTYPES.items():
        raw = torch.arange(24, dtype=torch.uint8)[: 3 * dtype.itemsize]
        dtypes[name] = raw.clone().view(dtype).reshape(3, 1) if dtype != torch.bool else torch.tensor([True, False])
    state = {**dtypes, "number": torch.tensor(2.5), "empty": torch.zeros(0, 3), "täst": torch.ones(2)}
    # By one process, which writes an index.
    mapping = {name: 1 + place % 3 for place, name in enumerate(state)}
    for case, options in [("alone", {}), ("alone3", {"fqn_to_index_mapping": mapping})]:
        path = folder / case
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(path), **options), no_dist=True)
        print(path, shown(state), flush=True)
    for ranks in (1, 2, 4):
        arguments = (ranks, str(folder / f"ranks{ranks}"), free_port())
        torch.multiprocessing.spawn(work, arguments, nprocs=ranks)


def dump(folder):
    reader = dcp.HuggingFaceStorageReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    state = {name: torch.zeros(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
    print(shown(state))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        for folder in sys.argv[2:]:
            dump(folder)
