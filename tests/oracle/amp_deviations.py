"""What calls of PyTorch's AMP do where this crate does otherwise, so that docs/differences.md stays true. The differences
in the course of an iteration are in scaler_deviations.py."""

import torch
from deviations import refused, run_all


class WithArguments(torch.optim.SGD):
    def step(self, *args, **kwargs):
        super().step()
        return args, kwargs


def scaled(optimizer_type=torch.optim.SGD):
    param = torch.ones(2, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    return scaler, optimizer_type([param], lr=0.1)


def step_passes_its_arguments_and_returns_what_the_optimizer_returns():
    scaler, optimizer = scaled(WithArguments)
    assert scaler.step(optimizer, 3, name="n") == ((3,), {"name": "n"})


def a_closure_is_refused():
    scaler, optimizer = scaled()
    with refused(RuntimeError, "Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 0.0)


def a_new_scale_is_not_checked():
    scaler, _ = scaled()
    scaler.update(torch.tensor(torch.nan))
    assert scaler.get_scale() != scaler.get_scale()


def a_gradient_from_before_an_update_is_divided_by_the_new_scale():
    for unscales, expected in [(False, 0.25), (True, 0.5 / 16)]:
        a, b = (torch.zeros(1, requires_grad=True) for _ in range(2))
        of_a, of_b = (torch.optim.SGD([w], lr=0.5) for w in (a, b))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        scaler.scale((a + b).sum()).backward()
        if unscales:
            scaler.unscale_(of_b)
        scaler.step(of_a)
        scaler.update()
        scaler.step(of_b)
        assert (a.item(), b.item()) == (-0.5, -expected), (a, b)


def gradients_of_two_scales_are_added():
    a, b = (torch.zeros(1, requires_grad=True) for _ in range(2))
    of_a, of_b = (torch.optim.SGD([w], lr=0.5) for w in (a, b))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale((a + b).sum()).backward()
    scaler.step(of_a)
    scaler.update()
    scaler.scale(b.sum()).backward()
    scaler.step(of_b)
    assert b.item() == -0.5 * (8 + 16) / 16, b


def autocast_knows_more_device_types():
    for device_type in ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia", "xla"):
        assert torch.amp.is_autocast_available(device_type), device_type
    assert torch.amp.is_autocast_available(torch._C._get_privateuse1_backend_name())


run_all(globals())
