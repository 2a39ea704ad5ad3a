"""Arguments for the ops in the autocast lists of CUDA for which autocast_cases.py has none, by the dispatcher's names.

As there, ops of the lower-precision list get f32, those of the f32 lists get the region's dtype, and those that promote
get both.
"""

import torch

from autocast_cases import f32


def lower_precision():
    image, kernel, bias = f32(1, 2, 5, 5), f32(3, 2, 3, 3), f32(3)
    geometry = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    yield "_convolution", [image, kernel, bias, *geometry, False, True, True, True], {}
    yield "convolution", [image, kernel, bias, *geometry], {}
    yield "addmv", [f32(4), f32(4, 5), f32(5)], {}
    yield "addr", [f32(4, 5), f32(4), f32(5)], {}
    yield "mv", [f32(4, 5), f32(5)], {}
    yield "chain_matmul", [[f32(2, 3), f32(3, 4), f32(4, 2)]], {}
    yield "linalg_multi_dot", [[f32(2, 3), f32(3, 4), f32(4, 2)]], {}

    def cell(gates, state):
        return [f32(2, 4), state, f32(gates * 5, 4), f32(gates * 5, 5), f32(gates * 5), f32(gates * 5)]

    yield "lstm_cell", cell(4, [f32(2, 5), f32(2, 5)]), {}
    yield "gru_cell", cell(3, f32(2, 5)), {}
    yield "rnn_tanh_cell", cell(1, f32(2, 5)), {}
    yield "rnn_relu_cell", cell(1, f32(2, 5)), {}


def pointwise(low):
    for name in ("acos", "asin", "erfinv"):
        yield name, [low(8).clamp(-0.9, 0.9)], {}
    for name in ("cosh", "exp", "expm1", "reciprocal", "sinh", "softplus", "tan"):
        yield name, [low(8)], {}
    for name in ("log", "log10", "log1p", "log2", "rsqrt"):
        yield name, [low(8).abs() + 0.1], {}
    yield "exp", [torch.randn(8).double()], {}
    yield "pow.Scalar", [1.7, low(8)], {}
    yield "pow.Tensor_Scalar", [low(8).abs(), 1.7], {}
    yield "pow.Tensor_Tensor", [low(8).abs(), low(8)], {}


def reductions(low):
    yield "cosine_similarity", [low(4, 3), low(4, 3)], {}
    yield "dist", [low(8), low(8)], {}
    yield "frobenius_norm.dim", [low(4, 3), [0, 1], False], {}
    yield "group_norm", [low(2, 4, 3), 2], {}
    yield "layer_norm", [low(4, 3), [3]], {}
    yield "logsumexp", [low(4, 3), 1], {}
    yield "multi_margin_loss", [low(4, 3), torch.tensor([0, 2, 1, 1]), 1, 1.0, None, 1], {}
    yield "native_layer_norm", [low(4, 3), [3], low(3), low(3), 1e-5], {}
    yield "nuclear_norm", [low(4, 3), False], {}
    yield "nuclear_norm.dim", [low(2, 4, 3), [1, 2], False], {}
    yield "pdist", [low(4, 3)], {}
    yield "renorm", [low(4, 3), 2.0, 0, 1.0], {}


def with_an_optional_dtype(low):
    yield "cumprod", [low(4, 3), 0], {}
    yield "cumsum", [low(4, 3), 0], {}
    yield "linalg_matrix_norm", [low(4, 3), 1.0, [0, 1]], {}
    yield "linalg_matrix_norm.str_ord", [low(4, 3), "fro", [0, 1]], {}
    yield "linalg_vector_norm", [low(4, 3), 3.0, [1]], {}
    yield "log_softmax.int", [low(4, 3), 1], {}
    yield "norm.Scalar", [low(4, 3)], {}
    yield "norm.ScalarOpt_dim", [low(4, 3), 1.0, 1, False], {}
    yield "softmax.int", [low(4, 3), 1], {}
    yield "sum", [low(4, 3)], {}
    yield "sum", [torch.randn(4, 3).double()], {}
    yield "sum.dim_IntList", [low(4, 3), 1], {}


def upsampling(low):
    line, image, volume = low(1, 2, 5), low(1, 2, 5, 4), low(1, 2, 3, 4, 5)
    for exact in ("upsample_nearest", "_upsample_nearest_exact"):
        yield f"{exact}1d", [line, [7], None], {}
        yield f"{exact}2d", [image, [7, 6], None, None], {}
        yield f"{exact}3d", [volume, [5, 6, 7], None, None, None], {}
    yield "upsample_linear1d", [line, [7], True, None], {}
    for name in ("upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa"):
        yield name, [image, [7, 6], False, None, None], {}
    yield "upsample_trilinear3d", [volume, [5, 6, 7], False, None, None, None], {}


def promote(low):
    yield "addcdiv", [f32(8), low(8), low(8).abs() + 0.5], {}
    yield "addcmul", [low(8), low(8), f32(8)], {}
    yield "addcmul", [low(8), low(8), low(8)], {}
    yield "atan2", [f32(8), low(8)], {}
    yield "atan2", [f32(8), low(8).double()], {}
    yield "bilinear", [low(3, 2), f32(3, 4), low(5, 2, 4), f32(5)], {}
    yield "cross", [f32(4, 3), low(4, 3)], {}
    yield "dot", [low(8), f32(8)], {}
    yield "vdot", [f32(8), low(8)], {}
    yield "grid_sampler", [low(1, 2, 5, 5), f32(1, 3, 3, 2), 0, 1, False], {}
    yield "index_put", [f32(8), [torch.tensor([1, 3])], low(2)], {}
    yield "index_put", [low(8), [torch.tensor([1, 3])], f32(2)], {}
    yield "tensordot", [f32(2, 3, 4), low(3, 4, 5), [1, 2], [0, 1]], {}
    yield "scatter_add", [low(2, 3), 0, torch.tensor([[1, 0, 1], [0, 0, 1]]), f32(2, 3)], {}


def cases(dtype):
    """All cases as (op, args, kwargs) for a region of `dtype`."""

    def low(*shape):
        return torch.randn(shape).to(dtype)

    yield from lower_precision()
    for group in (pointwise, reductions, with_an_optional_dtype, upsampling, promote):
        yield from group(low)
