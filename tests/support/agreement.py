"""Whether the ranks of a job still train one model."""

import lightning as L
import torch
import torch.distributed as dist

from lightning_egeria.core.snapshots.digests import digest
from lightning_egeria.core.training.callback import freezing_of
from lightning_egeria.core.training.observers import Observer


class DisagreementError(AssertionError):
    pass


def compare_ranks(freezer, parameters=None):
    """See that all ranks have the same frozen prefix and the same parameters. Every rank must call it.

    Compared are the depth and version of the prefix, its tensors, and all parameters; of those that are sharded, no
    rank has a copy to compare.

    Args:
        freezer: of the model.
        parameters: their digest, if it was taken earlier.

    Raises:
        DisagreementError: on all ranks, if one differs from the first.
    """
    if not dist.is_initialized():
        return
    prefix = freezer.prefix
    found = {
        "depth and version": f"{prefix.depth} {prefix.version}".encode().ljust(16),
        "weights and buffers of the prefix": digest(prefix.tensors()),
        "parameters": parameters or digest(dict(prefix.module.named_parameters())),
    }
    for what, mine in found.items():
        everyone = _gathered(mine)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise DisagreementError(f"the {what} of rank {rank} are not those of rank 0")


def checked(freezing):
    """A freezing callback, with `Agreement` among its observers."""
    freezing.observers.add(Agreement(freezing))
    return freezing


class ChecksRanks(L.Callback):
    """Gives `Agreement` to the callback that freezes, where a test does not hold it in its hands."""

    def setup(self, trainer, pl_module, stage):
        checked(freezing_of(trainer))


class Agreement(Observer):
    """Compares the ranks after each freeze, each unfreeze, and each time that statistics have settled."""

    def __init__(self, freezing):
        self.freezing, self.comparisons = freezing, 0
        self._seen = None
        self._parameters = b""

    def batch_end(self):
        """Digests the parameters before the decision: a strategy that wraps them anew may make equal what was not."""
        freezer = self.freezing.freezer
        if freezer is not None:
            self._parameters = digest(dict(freezer.prefix.module.named_parameters()))

    def optimizer_step(self, step):
        freezer = self.freezing.freezer
        if freezer is None or not dist.is_initialized():
            return
        prefix = freezer.prefix
        before, self._seen = self._seen, (prefix, prefix.version)
        if prefix.version > 0 and self._seen != before:
            self.comparisons += 1
            compare_ranks(freezer, self._parameters)


def _gathered(data):
    """What each rank has given, in their order."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [bytes(other.numpy()) for other in everyone]
