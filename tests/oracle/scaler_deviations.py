"""PyTorch's GradScaler with the deliberate differences of tch-amp, and nothing else changed."""

import torch
from torch.amp.grad_scaler import GradScaler, OptState

MIN_SCALE = 2.0**-126


class Scaler(GradScaler):
    """Each method below with a docstring is one difference."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # `step` and `update` need no `scale` before them: the scale exists from the beginning.
        if self._enabled:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        """A gradient that overflows when it is unscaled is an overflow; PyTorch looks only before it multiplies."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if self._scale.item() < 1.0:
            self.check_into(found, optimizer)
        return found

    def check_into(self, found, optimizer):
        ones, zero = torch.ones(()), torch.zeros(())
        for device, found_inf in super()._unscale_grads_(optimizer, ones, zero, True).items():
            found[device] += found_inf

    def step_outcome(self, optimizer):
        """What `step` did, in one word; PyTorch does not tell."""
        before = optimizer.calls
        if self._enabled:
            if self.has_no_gradients(optimizer):
                return "no-gradients"
            self.check_again(optimizer)
        self.step(optimizer)
        return "stepped" if optimizer.calls > before else "skipped"

    def has_no_gradients(self, optimizer):
        """An optimizer without a single gradient is an answer, not PyTorch's "No inf checks were recorded"."""
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
            return self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        return False

    def unscale_(self, optimizer):
        """Without a single gradient there is nothing to unscale, and nothing that has to be ended by `update`."""
        super().unscale_(optimizer)
        if self._enabled and not self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
            del self._per_optimizer_states[id(optimizer)]

    def check_again(self, optimizer):
        """An infinity that came into a gradient after `unscale_` is an overflow, too; PyTorch applies it."""
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            self.check_into(state["found_inf_per_device"], optimizer)

    def update(self, new_scale=None):
        """The scale never sinks below the smallest one whose reciprocal is finite."""
        super().update(new_scale)
        if self._enabled:
            self._scale.clamp_(min=MIN_SCALE)

    def set_growth_interval(self, new_interval):
        """A tracker beyond the new interval lets the scale grow at the next success; PyTorch's never grows again."""
        super().set_growth_interval(new_interval)
        if self._enabled:
            self._growth_tracker.clamp_(max=new_interval - 1)

    def state_dict(self):
        """The state cannot be saved while an iteration is open: PyTorch refuses that only when it pickles."""
        if self._enabled and any(
            state["stage"] is not OptState.READY for state in self._per_optimizer_states.values()
        ):
            raise AssertionError("A GradScaler instance may only be pickled at the beginning of an iteration")
        return super().state_dict()
