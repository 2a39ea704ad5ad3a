"""What calls of PyTorch's AMP do where this crate does otherwise, so that docs/differences.md stays true. The differences
in the course of an iteration are in scaler_deviations.py."""

import torch


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
    try:
        scaler.step(optimizer, closure=lambda: 0.0)
    except RuntimeError as error:
        assert "Closure use is not currently supported" in str(error), error
    else:
        raise AssertionError("a closure is taken")


def a_new_scale_is_not_checked():
    scaler, _ = scaled()
    scaler.update(torch.tensor(torch.nan))
    assert scaler.get_scale() != scaler.get_scale()


def autocast_knows_more_device_types():
    for device_type in ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia", "xla"):
        assert torch.amp.is_autocast_available(device_type), device_type
    assert torch.amp.is_autocast_available(torch._C._get_privateuse1_backend_name())


step_passes_its_arguments_and_returns_what_the_optimizer_returns()
a_closure_is_refused()
a_new_scale_is_not_checked()
autocast_knows_more_device_types()
print("as the table says")
