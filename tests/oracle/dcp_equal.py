"""Compares pairs of folders of torch.distributed.checkpoint: prints how many tensors both have, or fails.

dcp_equal.py ONE OTHER [ONE OTHER ...]
"""

import sys
import tempfile

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def loaded(folder):
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(folder, file.name)
        return torch.load(file.name, weights_only=True)


def tensors(one, other, path=""):
    """How many tensors two values have, whose bits and everything else must be the same."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert sorted(map(str, one)) == sorted(map(str, other)), path
        return sum(tensors(one[key], other[key], f"{path}.{key}") for key in one)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        return sum(tensors(a, b, f"{path}.{at}") for at, (a, b) in enumerate(zip(one, other)))
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape, path
        one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        assert torch.equal(one, other), path
        return 1
    assert one == other, path
    return 0


def main():
    folders = sys.argv[1:]
    for one, other in zip(folders[::2], folders[1::2]):
        print(tensors(loaded(one), loaded(other)))


main()
