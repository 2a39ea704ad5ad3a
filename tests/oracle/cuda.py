"""What CUDA computes otherwise than the CPU, on the CPU."""

import torch


def norm(grads):
    """The norm of the norms, each of which has its squares added up in f32, or in f64 for an f64 gradient. The order
    within a gradient is that of the simulated kernel."""
    f64 = torch.float64
    wide = [grad.square().sum().sqrt() for grad in grads if grad.dtype == f64]
    narrow = [grad.float().square().sum().sqrt() for grad in grads if grad.dtype != f64]
    if narrow:
        wide = [norm.float() for norm in wide]
    return torch.linalg.vector_norm(torch.stack(wide + narrow))


def clip_grads_with_norm(params, max_norm, total):
    """CUDA rounds the coefficient, a tensor without dimensions, to the dtype of the gradient that it multiplies. The CPU
    multiplies a half by it in f32."""
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for param in params:
        if param.grad is not None:
            param.grad.mul_(coefficient.to(param.grad.dtype))
