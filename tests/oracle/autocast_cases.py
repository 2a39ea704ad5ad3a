"""Arguments for the ops that AutocastCPU registers and tch can call, by the dispatcher's names, and for a few more.

Ops of the lower-precision policy get f32, those of the f32 policy get the region's dtype, those that promote get both:
so the result shows what the policy did.
"""

import torch


def f32(*shape):
    return torch.randn(shape)


def square(n=4):
    """A well-conditioned symmetric positive definite matrix: every factorisation of it exists."""
    root = torch.randn(n, n)
    return root @ root.T + n * torch.eye(n)


def lower_precision():
    geometry = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    image, kernel, bias = f32(1, 2, 5, 5), f32(3, 2, 3, 3), f32(3)
    yield "_convolution.deprecated", [image, kernel, bias, *geometry, False, True, True], {}
    weights = [f32(24, 8), f32(24), f32(8, 8), f32(8)]
    yield "_native_multi_head_attention", [f32(2, 3, 8), f32(2, 3, 8), f32(2, 3, 8), 8, 2, *weights], {}
    yield "addbmm", [f32(4, 6), f32(2, 4, 5), f32(2, 5, 6)], {}
    yield "addmm", [f32(6), f32(4, 5), f32(5, 6)], {}
    yield "baddbmm", [f32(2, 4, 6), f32(2, 4, 5), f32(2, 5, 6)], {"beta": 0.5, "alpha": 2.0}
    yield "bmm", [f32(2, 4, 5), f32(2, 5, 6)], {}
    for n in (1, 2, 3):
        image, kernel = f32(1, 2, *[5] * n), f32(4, 2, *[3] * n)
        yield f"conv{n}d", [image, kernel, f32(4), [2] * n, [1] * n, [1] * n, 1], {}
        yield f"conv{n}d.padding", [image, kernel, f32(4), [1] * n, "same", [2] * n, 1], {}
        overload = "" if n == 1 else ".input"
        kernel = f32(2, 3, *[3] * n)
        yield f"conv_transpose{n}d{overload}", [image, kernel, f32(3), [2] * n, [1] * n, [1] * n, 1, [1] * n], {}
    yield "conv_tbc", [f32(7, 2, 3), f32(3, 3, 4), f32(4), 1], {}
    yield "linalg_vecdot", [f32(4, 5), f32(4, 5)], {"dim": 0}
    yield "linear", [f32(4, 5), f32(6, 5), f32(6)], {}
    yield "linear", [f32(4, 5), f32(6, 5)], {}
    yield "linear", [f32(4, 5).double(), f32(6, 5).double()], {}
    yield "matmul", [f32(2, 4, 5), f32(5)], {}
    layer = [f32(20, 4), f32(20, 5), f32(20), f32(20), f32(2, 5), f32(2, 5)]
    yield "mkldnn_rnn_layer", [f32(3, 2, 4), *layer, False, [], 2, 5, 1, True, False, False, False], {}
    yield "mm", [f32(4, 5), f32(5, 6)], {}
    yield "mm", [f32(4, 5), f32(5, 6).double()], {}
    yield "prelu", [f32(2, 3, 4), f32(3)], {}
    yield "scaled_dot_product_attention", [f32(1, 2, 4, 8), f32(1, 2, 4, 8), f32(1, 2, 4, 8), None, 0.0, True], {}


def promote(low):
    yield "cat", [[low(4), f32(4)], 0], {}
    yield "cat", [[low(4), f32(4).double()], 0], {}
    yield "cat", [[f32(2, 3), low(2, 3), torch.ones(2, 3, dtype=torch.int64)], 1], {}
    yield "stack", [[low(4), f32(4)], 1], {}
    yield "index_copy", [f32(4, 3), 0, torch.tensor([2, 0]), low(2, 3)], {}


def losses(low):
    a, b, unit = low(4, 3), low(4, 3), low(4, 3).sigmoid()
    yield "binary_cross_entropy", [unit, b.sigmoid(), None, 1], {}
    yield "binary_cross_entropy_with_logits", [a, unit, low(3).abs(), low(3).abs(), 0], {}
    yield "cosine_embedding_loss", [a, b, torch.tensor([1, -1, 1, 1]), 0.1, 2], {}
    yield "cross_entropy_loss", [a, torch.tensor([0, 2, 1, 1]), low(3).abs(), 1, -100, 0.1], {}
    log_probs, targets = low(6, 2, 5).float().log_softmax(2).to(a.dtype), torch.tensor([[1, 2, 3], [2, 2, 4]])
    yield "ctc_loss.IntList", [log_probs, targets, [6, 6], [3, 2], 0, 0, False], {}
    yield "ctc_loss.Tensor", [log_probs, targets, torch.tensor([6, 6]), torch.tensor([3, 2]), 0, 1, False], {}
    yield "hinge_embedding_loss", [a, b.sign(), 1.0, 1], {}
    yield "huber_loss", [a, b, 1, 0.5], {}
    yield "kl_div", [a, unit, 2], {"log_target": False}
    yield "l1_loss", [a, b, 0], {}
    yield "margin_ranking_loss", [a, b, low(4, 3).sign(), 0.5, 1], {}
    yield "mse_loss", [a, b, 1], {}
    yield "multilabel_margin_loss", [a, torch.tensor([[0, 2, -1], [1, -1, 0], [2, 1, 0], [-1, 0, 0]]), 1], {}
    yield "nll_loss", [a, torch.tensor([0, 2, 1, 1]), low(3).abs(), 1, 1], {}
    yield "nll_loss2d", [low(2, 3, 2, 2), torch.ones(2, 2, 2, dtype=torch.int64), None, 2, -100], {}
    yield "poisson_nll_loss", [a, unit, True, True, 1e-8, 1], {}
    yield "smooth_l1_loss", [a, b, 1, 0.7], {}
    yield "soft_margin_loss", [a, b.sign(), 1], {}
    yield "triplet_margin_loss", [a, b, unit, 1.0, 2.0, 1e-6, True, 1], {}


def pooling_and_padding(low):
    yield "adaptive_avg_pool3d", [low(1, 2, 4, 5, 6), [2, 2, 3]], {}
    yield "adaptive_max_pool3d", [low(1, 2, 4, 5, 6), [2, 2, 3]], {}
    yield "avg_pool3d", [low(1, 2, 5, 5, 5), [3, 3, 3], [2, 2, 2], [1, 1, 1], False, False, None], {}
    yield "max_pool3d", [low(1, 2, 5, 5, 5), [3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1], True], {}
    yield "fractional_max_pool2d", [low(1, 2, 6, 6), [2, 2], [3, 3], torch.rand(1, 2, 2).to(low(1).dtype)], {}
    yield "fractional_max_pool3d", [low(1, 2, 6, 6, 6), [2, 2, 2], [3, 3, 3], torch.rand(1, 2, 3).to(low(1).dtype)], {}
    yield "max_unpool2d", [low(1, 1, 2, 2), torch.tensor([[[[0, 3], [9, 14]]]]), [4, 4]], {}
    places = torch.tensor([[[[[0, 3], [9, 14]]]]])
    yield "max_unpool3d", [low(1, 1, 1, 2, 2), places, [1, 4, 4], [1, 2, 2], [0, 0, 0]], {}
    yield "grid_sampler", [low(1, 2, 5, 5), low(1, 3, 3, 2), 0, 1, False], {}
    yield "grid_sampler_2d", [low(1, 2, 5, 5), low(1, 3, 3, 2), 2, 0, True], {}
    yield "grid_sampler_3d", [low(1, 2, 5, 5, 5), low(1, 3, 3, 3, 3), 0, 2, False], {}
    yield "_grid_sampler_2d_cpu_fallback", [low(1, 2, 5, 5), low(1, 3, 3, 2), 0, 0, False], {}
    yield "reflection_pad1d", [low(2, 5), [2, 1]], {}
    yield "reflection_pad2d", [low(1, 2, 5, 5), [2, 1, 1, 2]], {}
    yield "replication_pad1d", [low(2, 5), [2, 1]], {}
    yield "replication_pad2d", [low(1, 2, 5, 5), [2, 1, 1, 2]], {}
    yield "replication_pad3d", [low(1, 2, 3, 3, 3), [2, 1, 1, 2, 1, 1]], {}


def pointwise_and_reductions(low):
    yield "cdist", [low(4, 3), low(5, 3), 2.0, None], {}
    yield "fake_quantize_per_tensor_affine", [low(4, 3), 0.1, 0, -20, 20], {}
    yield "nanquantile", [low(4, 3), low(2).sigmoid(), 1, True], {"interpolation": "linear"}
    yield "nanquantile.scalar", [low(4, 3), 0.3, None, False], {"interpolation": "higher"}
    yield "polar", [low(4).abs(), low(4)], {}
    yield "prod", [low(4, 3)], {}
    yield "prod.dim_int", [low(4, 3), 1, True], {}
    yield "quantile", [low(4, 3), low(2).sigmoid(), 0, False], {"interpolation": "linear"}
    yield "quantile.scalar", [low(4, 3), 0.3, 1, False], {"interpolation": "nearest"}
    yield "trace", [low(4, 4)], {}
    yield "view_as_complex", [low(4, 2)], {}


def spectral(low):
    signal, image = low(4, 8), low(2, 4, 6)
    for name in ("fft", "hfft", "ifft", "ihfft", "irfft", "rfft"):
        yield f"fft_{name}", [signal, 8, -1, "backward"], {}
    for name in ("fft2", "ifft2", "irfft2", "rfft2"):
        yield f"fft_{name}", [image, None, [-2, -1], "ortho"], {}
    for name in ("fftn", "ifftn", "irfftn", "rfftn"):
        yield f"fft_{name}", [image, None, None, "forward"], {}
    window = low(8).abs()
    yield "stft", [low(2, 32), 8, 4, 8, window, False, True, True, False], {}
    yield "stft.center", [low(2, 32), 8, 4, 8, window, False, "reflect", True, True, True, True], {}


def factorisations(low):
    s = square().to(low(1).dtype)
    factor = torch.linalg.cholesky(square()).to(s.dtype)
    yield "_lu_with_info", [s, True, True], {}
    yield "cholesky", [s, True], {}
    yield "cholesky_inverse", [factor, False], {}
    yield "cholesky_solve", [low(4, 2), factor, False], {}
    yield "geqrf", [s], {}
    yield "inverse", [s], {}
    yield "linalg_cholesky", [s], {"upper": False}
    yield "linalg_cholesky_ex", [s], {"upper": True, "check_errors": False}
    yield "linalg_cond", [s, 2], {}
    yield "linalg_cond.p_str", [s, "fro"], {}
    yield "linalg_eig", [s], {}
    yield "linalg_eigh", [s, "L"], {}
    yield "linalg_eigvals", [s], {}
    yield "linalg_eigvalsh", [s, "U"], {}
    yield "linalg_householder_product", [low(4, 3), low(3)], {}
    yield "linalg_inv", [s], {}
    yield "linalg_inv_ex", [s], {"check_errors": False}
    yield "linalg_lstsq", [s, low(4, 2), None], {"driver": "gelsd"}
    yield "linalg_matrix_rank", [s, 0.1, True], {}
    yield "linalg_matrix_rank.atol_rtol_float", [s], {"atol": 0.1, "rtol": 0.1, "hermitian": False}
    tolerances = {"atol": torch.tensor(0.1), "rtol": torch.tensor(0.1)}
    yield "linalg_matrix_rank.atol_rtol_tensor", [s], {**tolerances, "hermitian": False}
    yield "linalg_matrix_rank.tol_tensor", [s, torch.tensor(0.1), False], {}
    yield "linalg_qr", [s, "complete"], {}
    yield "linalg_solve", [s, low(4, 2)], {"left": True}
    # tch always names a driver, and only CUDA takes one: the case compares the refusal.
    yield "linalg_svd", [s, True], {"driver": "gesvd"}
    yield "linalg_svdvals", [s], {"driver": "gesvd"}
    yield "linalg_tensorinv", [square().to(s.dtype).view(2, 2, 4), 2], {}
    yield "linalg_tensorsolve", [square().to(s.dtype).view(4, 2, 2), low(4), None], {}
    yield "lu_solve", [low(4, 2), s, torch.tensor([1, 2, 3, 4], dtype=torch.int32)], {}
    yield "orgqr", [low(4, 3), low(3)], {}
    yield "ormqr", [low(4, 3), low(3), low(4, 2), True, False], {}
    yield "pinverse", [low(4, 3), 1e-15], {}
    yield "qr", [low(4, 3), True], {}
    yield "svd", [low(4, 3), True, True], {}
    yield "triangular_solve", [low(4, 2), s, True, False, False], {}


def recurrent():
    def layer(gates):
        return [f32(gates * 5, 4), f32(gates * 5, 5), f32(gates * 5), f32(gates * 5)]

    options = [True, 1, 0.0, False, False, False]
    yield "lstm.input", [f32(3, 2, 4), [f32(1, 2, 5), f32(1, 2, 5)], layer(4), *options], {}
    yield "gru.input", [f32(3, 2, 4), f32(1, 2, 5), layer(3), *options], {}
    yield "rnn_tanh.input", [f32(3, 2, 4), f32(1, 2, 5), layer(1), *options], {}
    yield "rnn_relu.input", [f32(3, 2, 4), f32(1, 2, 5), layer(1), *options], {}


def other(low):
    """Ops of the CUDA-like lists whose entry there PyTorch's own test does not run or that 2.11 does not have."""
    yield "einsum", ["bkhd,bqhd->bqkh", [f32(2, 3, 2, 4), f32(2, 3, 2, 4)]], {}
    yield "rms_norm", [low(4, 3), [3], low(3), 1e-5], {}


def cases(dtype):
    """All cases as (op, args, kwargs) for a region of `dtype`."""

    def low(*shape):
        return torch.randn(shape).to(dtype)

    yield from lower_precision()
    for group in (promote, losses, pooling_and_padding, pointwise_and_reductions, spectral, factorisations, other):
        yield from group(low)
    yield from recurrent()
