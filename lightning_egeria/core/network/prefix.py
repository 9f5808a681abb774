"""The frozen prefix of a model: freezing its modules and restoring the user's settings."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_egeria.core.network.belonging import keeps_its_mode
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.upstream.torch import BatchNorm

SETTLING_STEPS = 40  # after which 1.5 % of a running statistic is older than the freeze
SETTLING_MOMENTUM = 0.1


class FrozenPrefix:
    """Freezes the first `depth` layer modules of a model, and restores the user's settings when they unfreeze.

    Frozen modules are in evaluation mode: running statistics stop, dropout is off, and so the prefix computes the same
    for a sample each time.

    Batch normalisation with a momentum below 0.1 (torchvision's MobileNetV3 has 0.01) follows its weights slowly. When
    it freezes, its running statistics still belong to much older weights. It therefore trains on for 40 optimizer steps
    with a momentum of 0.1 before it enters evaluation mode; its own momentum is restored outside these steps.

    Change the prefix between two optimizer steps only, never inside a gradient accumulation window. Otherwise the
    optimizer would apply an existing gradient to a frozen weight, or lose it.

    Attributes:
        module: the model.
        chain: its layer chain.
        depth: number of frozen layer modules.
        settled_depth: number of frozen layer modules whose running statistics no longer change; less than ``depth`` for
            some steps after a freeze.
        version: number of changes so far, of the depth or of the settled depth.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3), nn.Linear(3, 2))
    >>> chain = LayerChain.trace(net, lambda: net(torch.ones(5, 4)).sum())
    >>> prefix = FrozenPrefix(net, chain)
    >>> prefix.set_depth(1)
    >>> prefix.version, net[0].weight.requires_grad, [part.training for part in net]
    (1, False, [False, False, False, True, True])
    >>> prefix.set_depth(0)
    >>> prefix.version, net[0].weight.requires_grad, net[1].training
    (2, True, True)
    """

    def __init__(self, module: nn.Module, chain: LayerChain) -> None:
        self.module = module
        self.chain = chain
        self.depth = 0
        self.settled_depth = 0
        self.version = 0
        self._frozen_parameters: dict[nn.Parameter, None] = {}  # an ordered set
        self._shown = False  # as they are without this class
        self._members: list[nn.Module] = []
        self._held: list[tuple[nn.Module, bool, bool]] = []  # members in evaluation mode; their and the root's before
        self._asserting: list[nn.Module] = []  # with a ``train`` of their own, which may not mind frozen parts
        self._settling: dict[BatchNorm, int] = {}  # steps left
        self._momentum_before: dict[BatchNorm, float | None] = {}  # while a step runs

    def set_depth(self, depth: int) -> None:
        """Freeze or unfreeze so that exactly the first ``depth`` layer modules are frozen.

        Raises:
            ValueError: if ``depth`` is not in ``0 .. chain.max_depth``.
        """
        self.chain.check_depth(depth)
        if depth == self.depth:
            return
        members = self._modules_of(depth)
        new = set(members) - set(self._members)
        settling = {module: steps for module, steps in self._settling.items() if module in members}
        for module in members:
            if module in new and isinstance(module, BatchNorm) and module.training and follows_slowly(module):
                settling[module] = SETTLING_STEPS
        self._freeze(depth, settling)

    def show(self) -> bool:
        """Let frozen parameters look as they do unfrozen, for code that reads ``requires_grad`` between two batches.

        A program may save, export or count what trains, and mean what it has not frozen itself.

        Returns:
            Whether they did not look so before.
        """
        changed, self._shown = not self._shown, True
        for parameter in self._frozen_parameters:
            parameter.requires_grad_(True)
        return changed

    @property
    def shown_parameters(self) -> Collection[nn.Parameter]:
        """The frozen parameters that look trainable now; see `show`. Membership is by identity, and quick."""
        return self._frozen_parameters.keys() if self._shown else ()

    def hide(self) -> None:
        """End `show`, before the next forward. Safe to call twice."""
        if self._shown:
            self._shown = False
            for parameter in self._frozen_parameters:
                parameter.requires_grad_(False)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Return a context in which `show` holds."""
        changed = self.show()
        try:
            yield
        finally:
            if changed:
                self.hide()

    def extend(self, chain: LayerChain) -> None:
        """Take the chain with more parameters in its layer modules, and freeze those of the prefix."""
        self.chain = chain
        self._freeze(self.depth, self._settling)

    def _freeze(self, depth: int, settling: dict[BatchNorm, int]) -> None:
        self._thaw()
        for parameter in self.chain.parameters_of(self.module, depth).values():
            parameter.grad = None  # with a gradient, momentum and weight decay would keep moving it
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen_parameters[parameter] = None
        self.depth = depth
        self._members = self._modules_of(depth)
        self._settling = settling
        self._changed()

    def _modules_of(self, depth: int) -> list[nn.Module]:
        modules = dict(self.module.named_modules())
        return [modules[path] for path in self.chain.members(depth)]

    def _changed(self) -> None:
        self.settled_depth = self.depth
        while not self._settling.keys().isdisjoint(self._members[: len(self.chain.members(self.settled_depth))]):
            self.settled_depth -= 1
        self._hold_in_evaluation()
        self.version += 1

    def batch_start(self) -> None:
        """Prepare the frozen modules for a forward."""
        self.hide()
        self.assert_modes()
        for module in self._settling:
            if module not in self._momentum_before:
                self._momentum_before[module], module.momentum = module.momentum, SETTLING_MOMENTUM

    def batch_end(self) -> None:
        """Restore the momentum that `batch_start` set. Safe to call twice."""
        for module, momentum in self._momentum_before.items():
            if module.momentum == SETTLING_MOMENTUM:  # else other code has set it
                module.momentum = momentum
        self._momentum_before = {}

    def count_step(self) -> bool:
        """Count an optimizer step; return whether running statistics have settled, so that `settle` must follow."""
        self._settling = {module: steps - 1 for module, steps in self._settling.items()}
        return any(steps <= 0 for steps in self._settling.values())

    def settle(self) -> None:
        """Put modules whose running statistics have settled into evaluation mode."""
        self._settling = {module: steps for module, steps in self._settling.items() if steps > 0}
        self._changed()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types, for a checkpoint."""
        paths = {module: path for path, module in self.module.named_modules()}
        return {"depth": self.depth, "settling": {paths[module]: steps for module, steps in self._settling.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Freeze as in `state_dict`, up to ``chain.max_depth``."""
        depth = min(state["depth"], self.chain.max_depth)
        if depth != self.depth:
            modules = dict(zip(self.chain.members(depth), self._modules_of(depth), strict=True))
            found = {modules[path]: int(steps) for path, steps in state["settling"].items() if path in modules}
            self._freeze(depth, {module: steps for module, steps in found.items() if isinstance(module, BatchNorm)})

    def _hold_in_evaluation(self) -> None:
        held = {module for module, *_ in self._held}
        for module in self._members:
            if module in held or module in self._settling:
                continue
            self._held.append((module, module.training, self.module.training))
            # The user's code may call ``self.train()`` anywhere, even inside a training step.
            vars(module).setdefault("train", _StayInEvaluation(module))
        held = {module for module, *_ in self._held}
        for module in self.module.modules() if held else ():
            if type(module).train is not nn.Module.train and module not in held and "train" not in vars(module):
                vars(module)["train"] = _ThenAssertModes(module, self)
                self._asserting.append(module)
        self.assert_modes()

    def assert_modes(self) -> None:
        """Put modules back into evaluation mode if other code set ``training`` directly."""
        for module, *_ in self._held:
            if module.training:  # reading is much faster than setting
                module.training = False

    def with_own_mode(self) -> list[nn.Module]:
        """Return the modules inside frozen layers whose mode is not that of the frozen ones: see `keeps_its_mode`."""
        modules = dict(self.module.named_modules())
        units = [modules[path] for layer in self.chain.layer_modules[: self.depth] for path in layer.units]
        return [part for unit in units for part in unit.modules() if keeps_its_mode(part)]

    def buffers(self, depth: int) -> dict[str, Tensor]:
        """Return the buffers of the first ``depth`` layer modules by name, such as running statistics."""
        members = set(self.chain.members(depth))
        return {name: buffer for name, buffer in self.module.named_buffers() if name.rpartition(".")[0] in members}

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters of the frozen layer modules and the buffers of the settled ones, by name."""
        return {**self.chain.parameters_of(self.module, self.depth), **self.buffers(self.settled_depth)}

    def learning_parameter(self) -> str | None:
        """Return the name of a frozen parameter with a gradient (other code set ``requires_grad``), or None."""
        if all(parameter.grad is None for parameter in self._frozen_parameters):
            return None
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return next(names[parameter] for parameter in self._frozen_parameters if parameter.grad is not None)

    def gradient_bytes(self, depth: int) -> int:
        """Return the bytes of all gradients when the first ``depth`` layer modules are frozen."""
        prefix = set(self.chain.prefix_parameters(depth))
        return sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in self.module.named_parameters()
            if (parameter.requires_grad or parameter in self._frozen_parameters) and name not in prefix
        )

    def drop_gradients(self) -> None:
        """Remove gradients from frozen parameters, so that the optimizer skips them."""
        for parameter in self._frozen_parameters:
            parameter.grad = None

    def _thaw(self) -> None:
        for parameter in self._frozen_parameters:
            parameter.requires_grad_(True)
        self._shown = False
        self.batch_end()
        self._release()
        self._frozen_parameters, self._members, self._settling = {}, [], {}

    def _release(self) -> None:
        for module, training, root_training in self._held:
            if isinstance(vars(module).get("train"), _StayInEvaluation):
                del vars(module)["train"]
            # An error in validation leaves the whole model in evaluation mode.
            module.training = training and (self.module.training or not root_training)
        for module in self._asserting:
            if isinstance(vars(module).get("train"), _ThenAssertModes):
                del vars(module)["train"]
        self._held, self._asserting = [], []


def follows_slowly(module: BatchNorm) -> bool:
    """Whether the running statistics average over many batches; with a momentum of 0 they never change."""
    momentum = module.momentum
    return module.running_mean is not None and (momentum is None or 0 < momentum < SETTLING_MOMENTUM)


class _StayInEvaluation:
    """Replaces ``train`` of a frozen module. A copy or pickle of the module has the ``train`` of its class again."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, mode: bool = True) -> nn.Module:
        self._module.training = False
        for child in self._module.children():  # some may not be frozen
            child.train(mode)
        return self._module

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (type(self._module).train, self._module)


class _ThenAssertModes:
    """Replaces ``train`` of a module whose class has its own, which may set the mode of its parts directly."""

    def __init__(self, module: nn.Module, prefix: FrozenPrefix) -> None:
        self._module, self._prefix = module, prefix

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        module = type(self._module).train(self._module, *args, **kwargs)
        self._prefix.assert_modes()
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (type(self._module).train, self._module)
