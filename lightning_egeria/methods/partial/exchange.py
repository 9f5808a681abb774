"""Exchanging gradients that not all ranks computed: every rank gets the mean over those that did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_egeria.core.distributed.reducer import rebuild_reducer
from lightning_egeria.errors import ExchangeError, UnsupportedError
from lightning_egeria.methods.partial.buckets import BUCKET_BYTES, Bucket, buckets_of, contributors_of, received_bytes
from lightning_egeria.upstream.ddp import settings_of, with_settings

MOST_GROUPS = 256  # each has its own connections, and on GPUs its own communicator
# Where a broadcast that was started early holds up nothing. On a GPU it would hold up the sums of the backward.
EARLY_DEVICES = ("cpu",)


class GradientExchange:
    """Gives every rank the mean of each gradient over the ranks that computed it.

    Attributes:
        replaces_ddp: whether DDP must exchange nothing in the backward of this exchange.
    """

    replaces_ddp: bool

    def prepare(self) -> None:
        """The next batch begins. Every rank must call it. Does nothing by default."""

    def begin(self, depths: Sequence[int]) -> None:
        """Exchange the gradients of the backward that comes next. Every rank must call it with the same depths.

        Args:
            depths: number of layer modules in front of each rank's suffix.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Set all gradients to the means, once backward is over. Does nothing without `begin`."""
        raise NotImplementedError

    def abort(self) -> None:
        """Exchange nothing: the backward does not come, or failed."""
        raise NotImplementedError

    def close(self) -> None:
        """Restore everything. Safe to call twice."""
        raise NotImplementedError

    def received(self, depths: Sequence[int], rank: int) -> float:
        """Return the bytes of gradients that a rank receives in a step.

        Args:
            depths: number of layer modules in front of each rank's suffix.
            rank: the rank.
        """
        raise NotImplementedError


class RankGroups:
    """Runs collectives among some of the ranks. There are `MOST_GROUPS` groups at most: more replace them all.

    Args:
        timeout: of each collective; None takes that of the job.

    Attributes:
        rank: number of this process.
        size: number of processes.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], Any] = {}  # of ranks that this one is not among: a placeholder
        self._everyone: Any = None  # all ranks, for broadcasts

    def ensure(self, sets: Iterable[Collection[int]]) -> None:
        """Make the process groups that are not there yet. Every rank must call it with the same sets.

        Args:
            sets: ranks of each group. One rank alone, and all of them, need no group.
        """
        wanted = {tuple(sorted(ranks)) for ranks in sets if 1 < len(ranks) < self.size}
        if len(wanted | self._groups.keys()) > MOST_GROUPS:
            self.close()
        if self._everyone is None:
            self._everyone = dist.new_group(list(range(self.size)), timeout=self._timeout)
        for ranks in sorted(wanted - self._groups.keys()):
            self._groups[ranks] = dist.new_group(list(ranks), timeout=self._timeout)

    def start_sum(self, tensor: Tensor, ranks: Collection[int]) -> dist.Work:
        """Start to sum a tensor over some ranks, in place. Each of them must call it.

        Args:
            tensor: contiguous, of one shape on all ranks.
            ranks: at least two ranks, with this one.
        """
        return _started(dist.all_reduce(tensor, group=self._group(ranks), async_op=True))

    def start_broadcast(self, tensor: Tensor, root: int, ranks: Collection[int]) -> dist.Work:
        """Start to copy a tensor from the rank ``root`` to some ranks, in place. Each of them must call it.

        Broadcasts to all ranks have a group of their own, so their order among the sums is free.
        """
        group = self._group(ranks) if len(ranks) < self.size else self._everyone
        return _started(dist.broadcast(tensor, root, group=group, async_op=True))

    def close(self) -> None:
        """Drop the groups. Safe to call twice."""
        groups = [*self._groups.values(), self._everyone]
        self._groups, self._everyone = {}, None
        for group in groups:
            if isinstance(group, dist.ProcessGroup) and dist.is_initialized():
                dist.destroy_process_group(group)

    def _group(self, ranks: Collection[int]) -> Any:
        return self._groups[tuple(sorted(ranks))] if len(ranks) < self.size else None


class ContributorMean(GradientExchange):
    """Gives every rank the mean of each gradient over the ranks that computed it.

    A bucket is summed among its contributors as soon as backward has filled it. After backward, the first contributor
    sends it to the ranks that did not compute it; one contributor alone sends it at once. All ranks start collectives
    in the same order, so none waits for another forever. With ``k`` contributors among ``n`` ranks, a gradient of ``P``
    bytes takes ``2 (k - 1) P + (n - k) P`` bytes, against ``2 (n - 1) P`` among all.

    Args:
        transport: collectives among some of the ranks.
        layers: parameters of each layer module, front to back, and last of all that is in none.
        name_of: returns the name of a parameter, for messages.
        bucket_bytes: most bytes of a bucket that has several layer modules.
    """

    replaces_ddp = True

    def __init__(
        self,
        transport: RankGroups,
        layers: Sequence[Sequence[nn.Parameter]],
        name_of: Callable[[nn.Parameter], str],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._transport = transport
        self._layers = layers
        self._name_of = name_of
        self._bucket_bytes = bucket_bytes
        self._plans: dict[tuple[int, ...], tuple[Bucket, ...]] = {}
        self._own: list[Bucket] = []  # of this step, that this rank contributes to
        self._place: dict[nn.Parameter, int] = {}  # in them
        self._filled: list[set[nn.Parameter]] = []
        self._sums: list[tuple[Tensor, dist.Work]] = []  # of those that are started
        self._received: list[tuple[Tensor, dist.Work]] = []  # from the rank that contributes alone
        self._buckets: tuple[Bucket, ...] | None = None  # between `begin` and `finish`
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}

    def begin(self, depths: Sequence[int]) -> None:
        """Exchange the gradients of the backward that comes next. Every rank must call it with the same depths."""
        buckets = self._plans.get(tuple(depths))
        if buckets is None:
            buckets = self._plans[tuple(depths)] = buckets_of(self._layers, depths, self._bucket_bytes)
        self._transport.ensure({ranks for b in buckets for ranks in (b.contributors, b.receivers)})
        self._buckets = buckets
        self._own = [bucket for bucket in buckets if self._transport.rank in bucket.contributors]
        self._place = {parameter: place for place, bucket in enumerate(self._own) for parameter in bucket.parameters}
        self._filled = [set() for _ in self._own]
        self._sums, self._received = [], []
        if all(bucket.parameters[0].device.type in EARLY_DEVICES for bucket in buckets):
            self._received = self._receive(buckets)
        for parameter in self._place:
            if parameter not in self._hooks:  # a frozen one takes no hook before it trains
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._arrived)

    def finish(self) -> None:
        """Set all gradients to the means over their contributors, once backward is over.

        Raises:
            ExchangeError: if a gradient is missing, or another rank failed.
            UnsupportedError: if a gradient is sparse.
        """
        buckets, self._buckets = self._buckets, None
        if buckets is None:
            return
        if len(self._sums) < len(self._own):
            place = len(self._sums)
            missing = next(p for p in self._own[place].parameters if p not in self._filled[place])
            raise ExchangeError(
                f"{self._name_of(missing)!r} has no gradient in this step, and the other ranks wait for it. Leave out "
                "parameters that a step may not use, or use exchange='all' with find_unused_parameters=True"
            )
        try:
            self._finish(buckets)
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self._transport.rank} did not get the gradients of the other ranks: {error}. A rank has "
                "failed, or has fewer batches than the others. Look at its output, and give all ranks as many batches"
            ) from error

    def abort(self) -> None:
        """Exchange nothing: the backward does not come, or failed."""
        self._buckets = None

    def close(self) -> None:
        """Remove the hooks and the process groups. Safe to call twice."""
        self.abort()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._transport.close()

    def received(self, depths: Sequence[int], rank: int) -> float:
        """Return the bytes of gradients that a rank receives in a step.

        Args:
            depths: number of layer modules in front of each rank's suffix.
            rank: the rank.
        """
        buckets = self._plans.get(tuple(depths)) or buckets_of(self._layers, depths, self._bucket_bytes)
        return sum(bucket.received(rank) for bucket in buckets)

    def _arrived(self, parameter: Tensor) -> None:
        """Start the sums that have all their gradients, in the order of the buckets."""
        if self._buckets is None:
            return
        assert isinstance(parameter, nn.Parameter)
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise UnsupportedError(
                f"{self._name_of(parameter)!r} has a sparse gradient, which cannot be exchanged among contributors. "
                "Use sparse=False in the embedding"
            )
        place = self._place.get(parameter)
        if place is None:
            return
        if place < len(self._sums):
            raise UnsupportedError(
                f"{self._name_of(parameter)!r} received a second gradient in one backward, after the first was sent. "
                "Use use_reentrant=False in activation checkpointing"
            )
        self._filled[place].add(parameter)
        while len(self._sums) < len(self._own):
            place = len(self._sums)
            bucket = self._own[place]
            if len(self._filled[place]) < len(bucket.parameters):
                return
            self._sums.append(self._started(bucket))

    def _receive(self, buckets: tuple[Bucket, ...]) -> list[tuple[Tensor, dist.Work]]:
        """Start to receive what another rank contributes alone."""
        wanted = [one for one in buckets if one.is_of_one and self._transport.rank not in one.contributors]
        return [(flat, self._broadcast(bucket, flat)) for bucket in wanted for flat in [bucket.empty()]]

    def _broadcast(self, bucket: Bucket, flat: Tensor) -> dist.Work:
        return self._transport.start_broadcast(flat, bucket.contributors[0], bucket.receivers)

    def _started(self, bucket: Bucket) -> tuple[Tensor, dist.Work]:
        gradients = [parameter.grad for parameter in bucket.parameters]
        flat = torch.cat([gradient.detach().reshape(-1) for gradient in gradients if gradient is not None])
        if bucket.is_of_one:
            return flat, self._broadcast(bucket, flat)
        flat.mul_(1 / len(bucket.contributors))  # before the sum, as DDP does
        return flat, self._transport.start_sum(flat, bucket.contributors)

    @torch.no_grad()
    def _finish(self, buckets: tuple[Bucket, ...]) -> None:
        sums, received = iter(self._sums), iter(self._received or self._receive(buckets))
        filled: list[tuple[Bucket, Tensor, dist.Work | None]] = []
        for bucket in buckets:
            contributes = self._transport.rank in bucket.contributors
            if bucket.is_of_one:
                filled.append((bucket, *next(sums if contributes else received)))
                continue
            if contributes:
                flat, pending = next(sums)
                pending.wait()
            else:
                flat = bucket.empty()
            receives = self._transport.rank in bucket.receivers and len(bucket.receivers) > 1
            filled.append((bucket, flat, self._broadcast(bucket, flat) if receives else None))
        for bucket, flat, sent in filled:
            if sent is not None:
                sent.wait()
            if bucket.contributors != (self._transport.rank,):  # else its gradients are the means
                _set_gradients(bucket, flat)
        self._sums, self._received = [], []


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is one of the group
    return work


def _set_gradients(bucket: Bucket, flat: Tensor) -> None:
    pieces = flat.split([parameter.numel() for parameter in bucket.parameters])
    for parameter, piece in zip(bucket.parameters, pieces, strict=True):
        mean = piece.view(parameter.shape)
        # In the layout of the weight, as backward makes it: the optimizer must round alike on all ranks.
        if parameter.grad is None and parameter.is_contiguous():
            parameter.grad = mean
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(mean)


class RescaledMean(GradientExchange):
    """Turns DDP's mean over all ranks into the mean over contributors.

    DDP takes a rank without a gradient for one whose gradient is zero, and divides by the number of ranks: a gradient
    of one contributor among four is diluted to a quarter. This multiplies it by ranks over contributors. DDP sends all
    gradients, so it saves no bytes. Communication hooks keep working.

    Args:
        strategy: strategy of the Trainer, with a DDP wrapper. Until `close`, wrappers expect unused parameters.
        layers: parameters of each layer module, front to back, and last of all that is in none.
    """

    replaces_ddp = False

    def __init__(self, strategy: Any, layers: Sequence[Sequence[nn.Parameter]]) -> None:
        self._strategy = strategy
        self._layers = layers
        self._context = contextlib.ExitStack()
        self._depths: tuple[int, ...] | None = None  # between `begin` and `finish`
        self._rebuilt = False

    def prepare(self) -> None:
        """Make DDP expect parameters without a gradient, before the first forward. Every rank must call it."""
        if not self._rebuilt:
            self._rebuilt = True
            if not settings_of(self._strategy).get("find_unused_parameters"):
                self._context.enter_context(with_settings(self._strategy, find_unused_parameters=True))
                rebuild_reducer(self._strategy, ())

    def begin(self, depths: Sequence[int]) -> None:
        """Rescale the gradients of the backward that comes next."""
        self._depths = tuple(depths)

    @torch.no_grad()
    def finish(self) -> None:
        """Rescale the gradients, once DDP has exchanged them."""
        depths, self._depths = self._depths, None
        if depths is None:
            return
        for index, layer in enumerate(self._layers):
            contributors = len(contributors_of(depths, index))
            if 0 < contributors < len(depths):
                for parameter in layer:
                    if parameter.grad is not None:
                        parameter.grad.mul_(len(depths) / contributors)

    def abort(self) -> None:
        """Rescale nothing: the backward does not come, or failed."""
        self._depths = None

    def close(self) -> None:
        """Let wrappers made from now on expect no unused parameters. Safe to call twice."""
        self._context.close()

    def received(self, depths: Sequence[int], rank: int) -> float:
        """Return the bytes that a rank receives in a step: the gradients of all that trains, whatever the depths."""
        total = sum(p.numel() * p.element_size() for layer in self._layers for p in layer if p.requires_grad)
        return received_bytes(total, len(depths), contributes=True)
