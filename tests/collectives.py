"""Counts what the ranks of a job exchange in each step."""

from collections import Counter

import lightning as L
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(L.Callback):
    """How often each collective is called in a step, by its name, and the bytes of the tensors it fills.

    Without ``backward`` a step ends where its backward pass starts.
    """

    def __init__(self, backward=True):
        self.backward = backward
        self.counts, self.bytes = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._mode = _Counting()
        self._mode.__enter__()

    def on_before_backward(self, trainer, pl_module, loss):
        if not self.backward:
            self._end()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.backward:
            self._end()

    def _end(self):
        self._mode.__exit__(None, None, None)
        self.counts.append(self._mode.counts)
        self.bytes.append(self._mode.bytes)


class _Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            name = operation.name()
            self.counts[name] += 1
            self.bytes[name] += sum(leaf.nbytes for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor))
        return operation(*args, **(kwargs or {}))
