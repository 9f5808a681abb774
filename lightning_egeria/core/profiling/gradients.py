"""When the gradients of each layer module are complete in a backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_egeria.core.profiling.clock import mark, reached, seconds_between

Mark = float | torch.cuda.Event


class GradientClock:
    """Times a backward up to each layer module, by the arrival of its last gradient.

    That is the time of the computation alone: whatever waits for other processes comes after the last gradient.

    Args:
        layers: parameters of each layer module, front to back, and last of all that is in none.
        device: device that runs the backward.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> clock = GradientClock([list(part.parameters()) for part in (*net, nn.ReLU())], torch.device("cpu"))
    >>> loss = net(torch.ones(5, 4)).sum()
    >>> clock.start()
    >>> loss.backward()
    >>> clock.stop()
    >>> whole, last = clock.seconds()
    >>> 0 < last < whole
    True
    """

    def __init__(self, layers: Sequence[Sequence[nn.Parameter]], device: torch.device) -> None:
        self._device = device
        self._places = {parameter: place for place, layer in enumerate(layers) for parameter in layer}
        self._count = len(layers)
        self._hooks: list[RemovableHandle] = []
        self._began: Mark | None = None
        self._marks: dict[int, Mark] = {}

    def start(self) -> None:
        """The loss is computed, and its backward comes next."""
        self.stop()
        self._marks = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrived)
            for parameter in self._places
            if parameter.requires_grad
        ]
        self._began = mark(self._device)

    def stop(self) -> None:
        """Stop timing. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def timed(self) -> bool:
        """Whether the device has reached all marks; a GPU does so some time after the step."""
        return self._began is not None and all(map(reached, (self._began, *self._marks.values())))

    def seconds(self) -> list[float | None]:
        """Return the seconds of the backward down to each layer module, front to back; None where it did not come.

        The last layer module's include those of all that is behind it.
        """
        found: list[float | None] = [None] * (self._count - 1)
        longest = 0.0
        for place in range(self._count - 1, -1, -1):
            if self._began is not None and place in self._marks:
                longest = max(longest, seconds_between(self._began, self._marks[place]))
                if place < len(found):
                    found[place] = longest
        return found

    def _arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._marks[self._places[parameter]] = mark(self._device)
