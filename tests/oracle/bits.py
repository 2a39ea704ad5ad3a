"""Tensors as the bits of their numbers, in hexadecimal."""

import ctypes


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()).hex()


def encode(tensor):
    """The bits with the dtype and the shape, as JSON."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"kind": kind, "shape": list(tensor.shape), "bits": bits(tensor)}
