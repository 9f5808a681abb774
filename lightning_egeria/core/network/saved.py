"""The memory that autograd keeps from a forward for its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class SavedActivations:
    """Counts the bytes that autograd saves in a forward, between `start` and `stop`.

    Each storage counts once, however many operations save it. Parameters do not count: they are there anyway.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> saved = SavedActivations(net.parameters())
    >>> saved.start()
    >>> loss = net(torch.ones(5, 4)).sum()
    >>> saved.stop()
    >>> saved.nbytes  # the input has 5 rows of 4 numbers, the output of the ReLU 5 of 3
    140
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.nbytes = 0
        self._counted = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._kept: list[Tensor] = []  # so that no storage takes the address of one that was counted
        self._context = contextlib.ExitStack()

    def start(self) -> None:
        """Start counting."""
        self._context.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, _unchanged))

    def stop(self) -> None:
        """Stop counting. Safe to call twice."""
        self._context.close()
        self._kept = []

    def _save(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            try:
                address = storage.data_ptr()
            except RuntimeError:  # a subclass without memory of its own
                return tensor
            if address not in self._counted:
                self._counted.add(address)
                self._kept.append(tensor.detach())
                self.nbytes += storage.nbytes()
        return tensor


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
