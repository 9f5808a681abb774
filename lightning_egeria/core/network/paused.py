"""The paused prefix of a model: layer modules that run in training mode without gradient for one batch."""

from __future__ import annotations

import torch
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.compilation import forget_compiled
from lightning_egeria.errors import UnsupportedError


class PausedPrefix:
    """Runs the first layer modules of a model without gradient during one batch.

    Paused layer modules stay in training mode: dropout is active, and running statistics are updated. Autograd stops
    at the boundary. Everything behind it gets its usual gradient, skip connections included.

    Args:
        module: the model.
        chain: its layer chain.

    Attributes:
        chain: the same.
        active: whether parameters are held back now.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))
    >>> paused = PausedPrefix(net, LayerChain.trace(net, lambda: net(torch.ones(5, 4)).sum()))
    >>> paused.pause(1)
    >>> net(torch.ones(5, 4)).sum().backward()
    >>> paused.end()
    >>> paused.add_zero_gradients()
    >>> net[0].weight.requires_grad, float(net[0].weight.grad.abs().sum()), float(net[3].bias.grad.sum())
    (True, 0.0, 10.0)
    """

    def __init__(self, module: nn.Module, chain: LayerChain) -> None:
        self.chain = chain
        self._module = module
        self.active = False
        self._held: list[nn.Parameter] = []  # by the last `pause`

    def pause(self, depth: int) -> None:
        """Let the next forward run the first ``depth`` layer modules without gradient.

        Parameters that do not train are left alone.

        Raises:
            ValueError: if ``depth`` is not in ``0 .. chain.max_depth``.
        """
        self.chain.check_depth(depth)
        self.end()
        self._held = [p for p in self.chain.parameters_of(self._module, depth).values() if p.requires_grad]
        self._set_active(bool(self._held))

    def end(self) -> None:
        """Restore ``requires_grad``, once the backward is over. Safe to call twice."""
        self._set_active(False)

    def add_zero_gradients(self) -> None:
        """Give a gradient of zero to each parameter of the last pause that has none."""
        for parameter in self._held:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def check_gradients(self) -> None:
        """Check that a gradient of zero can take the place of the gradients there are.

        Raises:
            UnsupportedError: if a parameter that may be paused has a sparse gradient.
        """
        for name, parameter in self.chain.parameters_of(self._module, self.chain.max_depth).items():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise UnsupportedError(
                    f"{name!r} has a sparse gradient, and a step without its gradient needs a dense one. Use "
                    "sparse=False in the embedding"
                )

    def _set_active(self, active: bool) -> None:
        if active == self.active:
            return
        self.active = active
        for parameter in self._held:
            parameter.requires_grad_(not active)
        forget_compiled()
