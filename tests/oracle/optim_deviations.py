"""What PyTorch's fused optimizers do where this crate does otherwise, so that docs/differences.md stays true."""

import torch
from torch.optim import swa_utils


def stepped(optimizer):
    optimizer.step()
    return [p.tolist() for group in optimizer.param_groups for p in group["params"]]


def weight(values, grad):
    param = values.clone().requires_grad_()
    param.grad = grad
    return param


def halves_under_sgd_mostly_stay():
    for dtype in (torch.bfloat16, torch.float16):
        ones = torch.ones(40, dtype=dtype)
        (values,) = stepped(torch.optim.SGD([weight(ones, ones / 2)], lr=0.5, fused=True))
        assert values[:32] == [1.0] * 32 and values[32:] == [0.75] * 8, values


def strides_are_not_looked_at():
    values = torch.arange(6.0).reshape(2, 3)
    grad = values.t().contiguous().t()
    (left,) = stepped(torch.optim.SGD([weight(values, grad)], lr=1.0, fused=True))
    assert left != [[0.0] * 3] * 2, left


def a_skipped_first_step_counts():
    param = weight(torch.ones(4), torch.full((4,), torch.inf))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.tensor(1.0))
    scaler.step(optimizer)
    assert optimizer.state[param]["momentum_buffer"] is not None


def a_gradient_is_unscaled():
    param = weight(torch.ones(4), torch.full((4,), 65536.0))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.tensor(1.0))
    scaler.step(torch.optim.SGD([param], lr=0.1, fused=True))
    assert param.grad.tolist() == [1.0] * 4


def an_initial_accumulator_of_a_group_is_ignored():
    param = weight(torch.ones(2), torch.ones(2))
    optimizer = torch.optim.Adagrad([{"params": [param], "initial_accumulator_value": 3.0}], lr=0.1, fused=True)
    assert optimizer.state[param]["sum"].tolist() == [0.0] * 2


def frozen_parameters_are_stepped():
    param = weight(torch.ones(2), torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
    param.requires_grad_(False)
    assert stepped(optimizer) == [[0.0] * 2]


def half_norms_are_halves():
    param = weight(torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16))
    assert torch.nn.utils.clip_grad_norm_([param], 1.0).dtype == torch.bfloat16


def rmsprop_rounds_halves_after_each_operation():
    start, grad = torch.linspace(0.5, 1.5, 64), torch.linspace(-1, 1, 64)
    half = weight(start.bfloat16(), grad.bfloat16())
    wide = weight(start.bfloat16().float(), grad.bfloat16().float())
    results = [stepped(torch.optim.RMSprop([param], lr=0.01, momentum=0.9)) for param in (half, wide)]
    assert results[0] != [torch.tensor(results[1][0]).bfloat16().tolist()]


def the_weight_of_an_equal_average_is_f32():
    average, update = [torch.zeros(1, dtype=torch.float64)], [torch.ones(1, dtype=torch.float64)]
    swa_utils.get_swa_multi_avg_fn()(average, update, torch.tensor(2))
    assert average[0].item() == torch.tensor(1 / 3).item() != 1 / 3, average


torch.set_num_threads(1)
halves_under_sgd_mostly_stay()
strides_are_not_looked_at()
a_skipped_first_step_counts()
a_gradient_is_unscaled()
an_initial_accumulator_of_a_group_is_ignored()
frozen_parameters_are_stepped()
half_norms_are_halves()
rmsprop_rounds_halves_after_each_operation()
the_weight_of_an_equal_average_is_f32()
print("as the table says")
