"""PyTorch's GradScaler with the deliberate differences of tch-amp, and nothing else changed."""

import torch
from torch.amp.grad_scaler import GradScaler, OptState, _refresh_per_optimizer_state

MIN_SCALE = 2.0**-126


class Refused(Exception):
    """An error that PyTorch lacks, in one word."""


class Record:
    """A list of parameters, the gradients that were unscaled or stepped with, and PyTorch's state of the optimizer."""

    def __init__(self, params, state):
        self.params, self.state = params, state
        self.rescaled = self.dirty = False
        self.cleared, self.reached = set(), set()
        self.look()

    def look(self):
        self.grads = [param.grad for param in self.params]
        self.versions = [grad._version if grad is not None else 0 for grad in self.grads]

    def changed(self, index):
        """Whether a gradient was changed in place, by anyone."""
        grad = self.params[index].grad
        return grad is not None and grad is self.grads[index] and grad._version != self.versions[index]

    def has(self, grad):
        return any(known is grad and index not in self.cleared for index, known in enumerate(self.grads))

    def note_scale(self, leaves):
        """What a scaled loss may be the reason for, from here on. It does not hide what another one may have added."""
        stepped = self.state["stage"] is OptState.STEPPED
        for index in range(len(self.params)):
            grad = self.params[index].grad
            if not stepped and self.changed(index) and index in self.reached:
                pass
            elif self.changed(index):
                self.versions[index] = grad._version
                self.dirty |= not stepped
                if stepped and not grad.any():
                    self.cleared.add(index)
            elif grad is None and not stepped:
                self.grads[index] = None
            if not stepped and any(self.params[index] is leaf for leaf in leaves):
                self.reached.add(index)
        self.rescaled |= not stepped

    def compare(self):
        """A gradient that was replaced, or that another loss has changed, mixes with those that were unscaled."""
        for index, param in enumerate(self.params):
            if param.grad is None:
                continue
            if param.grad is not self.grads[index] or (self.changed(index) and self.rescaled):
                raise Refused("changed")
            self.dirty |= self.changed(index)


def leaves_of(outputs):
    """The tensors that the backward of these losses gives gradients, of which `scale` takes one or nested lists."""
    if not isinstance(outputs, torch.Tensor):
        return [leaf for output in outputs for leaf in leaves_of(output)]
    leaves, nodes = [], [outputs.grad_fn]
    while nodes:
        node = nodes.pop()
        nodes += [following for following, _ in node.next_functions if following is not None]
        leaves += [node.variable] if hasattr(node, "variable") else []
    return leaves


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


class Scaler(GradScaler):
    """Each method below with a docstring is one difference."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.records = []
        # `step` and `update` need no `scale` before them: the scale exists from the beginning.
        if self._enabled:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

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

    def scale(self, outputs):
        leaves = leaves_of(outputs)
        for record in self.records:
            record.note_scale(leaves)
        return super().scale(outputs)

    def find(self, optimizer):
        """An optimizer is known by its parameters, so that two with one list are the same; PyTorch knows it by its id."""
        params = params_of(optimizer)
        best = None
        for record in self.records:
            count = len(record.params)
            begins = count <= len(params) and all(a is b for a, b in zip(record.params, params))
            if begins and (best is None or count >= len(best.params)):
                best = record
        if best is None or any(param.grad is not None for param in params[len(best.params) :]):
            return None
        return best

    def owner(self, optimizer):
        """Gradients that a backward has made since a step are new work, even of an optimizer that was stepped.

        PyTorch refuses a second step of one optimizer, and steps another one. Gradients that are not new, it unscales
        once more for the other one, whose step is then far too small.
        """
        record = self.find(optimizer)
        if record is not None and record.state["stage"] is not OptState.STEPPED:
            return record
        grads = [param.grad for param in params_of(optimizer) if param.grad is not None]
        if not any(self.is_known(grad) for grad in grads):
            return None
        if record is None:
            raise Refused("shared")
        return record

    def is_known(self, grad):
        """The latest record that ever had a gradient decides whether it is new."""
        having = [record for record in self.records if any(known is grad for known in record.grads)]
        return bool(having) and having[-1].has(grad)

    def attach(self, optimizer):
        """Gives PyTorch the state of the record; returns the record."""
        record = self.owner(optimizer)
        state = _refresh_per_optimizer_state() if record is None else record.state
        self._per_optimizer_states = {id(optimizer): state}
        return record

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
        if self.attach(optimizer) is None:
            self.unscale_(optimizer)
        return self.attach(optimizer) is None

    def unscale_(self, optimizer):
        """Without a single gradient there is nothing to unscale, and nothing that has to be ended by `update`."""
        if not self._enabled:
            return
        record = self.attach(optimizer)
        super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if record is None and state["found_inf_per_device"]:
            self.records.append(Record(params_of(optimizer), state))

    def check_again(self, optimizer):
        """An infinity that came into a gradient after `unscale_` is an overflow, too; PyTorch applies it."""
        record = self.find(optimizer)
        if record.state["stage"] is not OptState.UNSCALED:
            return
        record.compare()
        if record.dirty:
            self.check_into(record.state["found_inf_per_device"], optimizer)
            record.look()
            record.dirty = False

    def check_unchanged(self, optimizer):
        """Clipping in a transaction refuses what a step refuses."""
        record = self.find(optimizer) if self._enabled else None
        if record is not None:
            record.compare()

    def note_clipped(self, optimizer, norm):
        """A norm that is not finite counts as an infinite gradient; PyTorch makes all gradients zero, and steps."""
        record = self.find(optimizer) if self._enabled else None
        if record is None:
            return
        if norm is not None and not norm.isfinite():
            for flag in record.state["found_inf_per_device"].values():
                flag.fill_(1)
        record.look()

    def update(self, new_scale=None):
        """The scale never sinks below the smallest one whose reciprocal is finite."""
        self._per_optimizer_states = {index: record.state for index, record in enumerate(self.records)}
        super().update(new_scale)
        self.records = []
        if self._enabled:
            self._scale.clamp_(min=MIN_SCALE)

    def set_growth_interval(self, new_interval):
        """A tracker beyond the new interval lets the scale grow at the next success; PyTorch's never grows again."""
        super().set_growth_interval(new_interval)
        if self._enabled:
            self._growth_tracker.clamp_(max=new_interval - 1)

    def state_dict(self):
        """The state cannot be saved while an iteration is open: PyTorch refuses that only when it pickles."""
        if self._enabled and self.records:
            raise AssertionError("A GradScaler instance may only be pickled at the beginning of an iteration")
        return super().state_dict()
