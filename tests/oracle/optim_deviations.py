"""What PyTorch's fused optimizers do where this crate does otherwise, so that docs/differences.md stays true."""

import torch
from deviations import refused, run_all
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


def a_nan_in_amsgrads_average_is_kept_except_in_the_last_elements_of_the_fused_kernel():
    for fused, hidden in ((True, 3), (False, 0)):
        param = weight(torch.ones(19), torch.ones(19))
        optimizer = torch.optim.AdamW([param], lr=0.1, amsgrad=True, fused=fused)
        optimizer.step()
        optimizer.state[param]["exp_avg_sq"].fill_(torch.nan)
        optimizer.step()
        assert param.isnan().tolist() == [True] * (19 - hidden) + [False] * hidden


def the_first_parameter_has_the_eps_of_all():
    def moved(*values):
        params = [weight(value, torch.full_like(value, 1e-12)) for value in values]
        return stepped(torch.optim.Adafactor(params, lr=0.1, foreach=False))[-1]

    ones = torch.ones(2)
    assert moved(ones.double(), ones) != moved(ones)


def adafactor_divides_by_the_number_of_elements():
    param = weight(torch.ones(0), torch.ones(0))
    with refused(ZeroDivisionError):
        stepped(torch.optim.Adafactor([param], foreach=False))


def frozen_parameters_are_stepped():
    param = weight(torch.ones(2), torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
    param.requires_grad_(False)
    assert stepped(optimizer) == [[0.0] * 2]


def half_norms_are_halves():
    param = weight(torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16))
    assert torch.nn.utils.clip_grad_norm_([param], 1.0).dtype == torch.bfloat16


def powers_overflow_and_underflow_although_their_norms_do_not():
    for number, norm_type, norm in [(1e20, 3.0, torch.inf), (1e-20, 3.0, 0), (1e5, 8.0, torch.inf)]:
        param = weight(torch.ones(2), torch.full((2,), number))
        assert torch.nn.utils.clip_grad_norm_([param], 1.0, norm_type) == norm


def norms_of_types_that_make_no_sense_are_taken():
    for norm_type, norm in [(0.0, 1.0), (-1.0, 0.0), (-torch.inf, 0.0)]:
        param = weight(torch.ones(2), torch.tensor([3.0, 0.0]))
        assert torch.nn.utils.clip_grad_norm_([param], 1.0, norm_type) == norm, norm_type


def nothing_has_no_largest_value():
    param = weight(torch.ones(0), torch.ones(0))
    assert torch.nn.utils.clip_grad_norm_([param], 1.0) == 0
    with refused(RuntimeError, "infinity norm on an empty tensor"):
        torch.nn.utils.clip_grad_norm_([param], 1.0, torch.inf)


def rmsprop_rounds_halves_after_each_operation():
    start, grad = torch.linspace(0.5, 1.5, 64), torch.linspace(-1, 1, 64)
    half = weight(start.bfloat16(), grad.bfloat16())
    wide = weight(start.bfloat16().float(), grad.bfloat16().float())
    results = [stepped(torch.optim.RMSprop([param], lr=0.01, momentum=0.9)) for param in (half, wide)]
    assert results[0] != [torch.tensor(results[1][0]).bfloat16().tolist()]


def muon_normalizes_a_bf16_momentum_buffer_in_place():
    for nesterov, dtype, is_kept in [(False, torch.bfloat16, False), (True, torch.bfloat16, True), (False, None, True)]:
        param = weight(torch.ones(2, 2, dtype=dtype), torch.full((2, 2), 8.0, dtype=dtype))
        optimizer = torch.optim.Muon([param], momentum=0.5, nesterov=nesterov)
        optimizer.step()
        # The momentum is half of the gradient, and its norm is 8.
        buffer = optimizer.state[param]["momentum_buffer"].tolist()
        assert buffer == [[4.0 if is_kept else 0.5] * 2] * 2, buffer


def muon_rounds_halves_after_each_operation():
    start, grad = torch.linspace(0.5, 1.5, 64).view(8, 8), torch.linspace(-1, 1, 64).view(8, 8).sin()
    half = weight(start.bfloat16(), grad.bfloat16())
    wide = weight(start.bfloat16().float(), grad.bfloat16().float())
    results = [stepped(torch.optim.Muon([param], lr=0.01)) for param in (half, wide)]
    assert results[0] != [torch.tensor(results[1][0]).bfloat16().tolist()]


def muon_takes_only_matrices():
    for shape in [(3,), (2, 3, 4, 4)]:
        with refused(ValueError, "2D", shape):
            torch.optim.Muon([torch.ones(shape, requires_grad=True)])


def the_weight_of_an_equal_average_is_f32():
    average, update = [torch.zeros(1, dtype=torch.float64)], [torch.ones(1, dtype=torch.float64)]
    swa_utils.get_swa_multi_avg_fn()(average, update, torch.tensor(2))
    assert average[0].item() == torch.tensor(1 / 3).item() != 1 / 3, average


torch.set_num_threads(1)
run_all(globals())
