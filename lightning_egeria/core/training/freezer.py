"""The mechanism of freezing: one object that freezes the front of a model on all processes of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.distributed.reducer import rebuild_reducer
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.compilation import forget_compiled, is_compiled
from lightning_egeria.core.network.gate import FrontGate
from lightning_egeria.core.network.prefix import FrozenPrefix
from lightning_egeria.core.network.sharding import holds_shards
from lightning_egeria.core.snapshots.digests import sums
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.core.training.observers import Observer
from lightning_egeria.errors import first_of


def tell_what_trains(strategy: Any, frozen_buffers: Collection[str] = ()) -> None:
    """Tell compiled code and DDP which parameters need gradients now. Each rank must call it.

    Args:
        strategy: strategy of the Trainer; None without a Trainer.
        frozen_buffers: names of buffers that no longer change.
    """
    forget_compiled()
    rebuild_reducer(strategy, frozen_buffers)


@dataclasses.dataclass(frozen=True)
class Decision:
    """A decision to freeze exactly the first ``depth`` layer modules, with its reason."""

    depth: int
    reason: str


@dataclasses.dataclass(frozen=True)
class FreezingEvent:
    """One change of the frozen depth.

    Attributes:
        step: number of optimizer steps before the change.
        kind: ``"freeze"`` or ``"unfreeze"``.
        depth: frozen depth after the change.
        reason: why, in words and numbers.
    """

    step: int
    kind: str
    depth: int
    reason: str

    def describe(self, layer_modules: Sequence[str]) -> str:
        """Return one line for the log.

        >>> FreezingEvent(120, "freeze", 1, "scheduled").describe(["stem", "layer1"])
        "step 120: froze 1 of 2 layer modules, up to 'stem': scheduled"
        >>> FreezingEvent(300, "unfreeze", 0, "scheduled").describe(["stem", "layer1"])
        'step 300: unfroze, 0 of 2 layer modules stay frozen: scheduled'
        """
        depth = f"{self.depth} of {len(layer_modules)} layer modules"
        if self.kind == "freeze":
            return f"step {self.step}: froze {depth}, up to {layer_modules[self.depth - 1]!r}: {self.reason}"
        return f"step {self.step}: unfroze, {depth} stay frozen: {self.reason}"


class Freezer(Observer):
    """Freezes and unfreezes the front of a model between two optimizer steps.

    It owns the layer chain, the frozen prefix, the ranks of the job and the gradient reducer of the strategy. After
    `freeze_to`, frozen layer modules cost no backward, no optimizer work and no communication. With several ranks, each
    rank must call `freeze_to` after the same step with the same depth.

    Args:
        module: the model in training.
        chain: its layer chain.
        ranks: processes that train it. By default this one, or all of the initialised process group.
        strategy: strategy of the Trainer, to rebuild its DDP wrapper; None without a Trainer.
        events: list to append each change to; by default a new one.
        step: number of optimizer steps done before.
        notices: takes log lines and warnings.

    Attributes:
        prefix: the frozen prefix.
        ranks: processes that train the model.
        events: every freeze and unfreeze so far.
        step: number of optimizer steps so far.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))
    >>> freezer = Freezer(net, LayerChain.trace(net, lambda: net(torch.ones(5, 4)).sum()))
    >>> freezer.freeze_to(1, "for this example")
    FreezingEvent(step=0, kind='freeze', depth=1, reason='for this example')
    >>> net[0].weight.requires_grad, net[2].weight.requires_grad
    (False, True)
    """

    def __init__(
        self,
        module: nn.Module,
        chain: LayerChain,
        ranks: Ranks | None = None,
        strategy: Any = None,
        events: list[FreezingEvent] | None = None,
        step: int = 0,
        notices: Notices | None = None,
    ) -> None:
        self.prefix = FrozenPrefix(module, chain)
        self.ranks = ranks if ranks is not None else Ranks()
        self.events = events if events is not None else []
        self.step = step
        self._strategy = strategy
        self._version_before = 0  # of the prefix, when the batch began
        self._regained: str | None = None
        self._notices = notices if notices is not None else Notices("freezing")
        self._gate = FrontGate(module, chain)
        self._is_compiled = False
        self._gated = -1  # version of the prefix that the gate is for
        self._watches = False  # whether the next optimizer step may change frozen weights
        self._suspects = False  # frozen weights have changed
        self._before_step: dict[str, int] | None = None  # sums of the frozen weights
        self._when_due: dict[str, int] | None = None

    @property
    def chain(self) -> LayerChain:
        """The layer modules, front to back."""
        return self.prefix.chain

    @property
    def depth(self) -> int:
        """Number of frozen layer modules."""
        return self.prefix.depth

    @property
    def regained_gradient(self) -> str | None:
        """Name of a frozen parameter that received a gradient because other code set its ``requires_grad``, or None."""
        return self._regained or self.prefix.learning_parameter()

    @property
    def why_regained(self) -> str:
        """What gave a frozen parameter a gradient, in words: there was one after the backward, or only later."""
        if self._regained is not None:
            return "other code changes requires_grad"
        return "the optimizer, or code that runs with its step, wrote it"

    def freeze_to(self, depth: int, reason: str) -> FreezingEvent | None:
        """Freeze exactly the first ``depth`` layer modules, from the next training step on.

        Args:
            depth: in ``0 .. chain.max_depth``; 0 unfreezes everything.
            reason: why, for the log and the records.

        Returns:
            The change; None if exactly ``depth`` layer modules are frozen already.

        Raises:
            ValueError: if ``depth`` is out of range.
        """
        if depth == self.depth:
            return None
        kind = "freeze" if depth > self.depth else "unfreeze"
        if kind == "freeze":
            self.ranks.share_buffers(self.prefix.buffers(depth))
        self.prefix.set_depth(depth)
        self.update_reducer()
        event = FreezingEvent(self.step, kind, depth, reason)
        self.events.append(event)
        return event

    def moved(self, due: bool) -> tuple[str, bool] | None:
        """Return a frozen parameter whose values have changed, and whether the optimizer's step changed it.

        The first step after each change of the prefix is watched. Where values have changed between two times that a
        comparison is ``due``, all steps until the next one are. Call it after each optimizer step. With several ranks,
        each must call it: one may hold a part of the weights only.

        Args:
            due: whether to compare with the values when it was due last.
        """
        before, self._before_step = self._before_step, None
        if before is not None:
            self._watches = False
            if (name := self._changed_since(before)) is not None:
                return name, True
        if not due:
            self._watches = self._watches or self._suspects
            return None
        changed = self._changed_since(self._when_due) if self._when_due is not None else None
        self._when_due = self._sums()
        self._suspects = self._watches = changed is not None
        return None if changed is None else (changed, False)

    def _changed_since(self, before: Mapping[str, int]) -> str | None:
        now = self._sums()
        if now.keys() != before.keys() or self._regained is not None:
            return None  # in the last case, other code lets it train
        changed = [name for name in now if now[name] != before[name]]
        if self.ranks.several and holds_shards(self.prefix.module):
            changed = [name for names in self.ranks.each(changed) for name in names]
        return changed[0] if changed else None

    def _sums(self) -> dict[str, int]:
        parameters = dict(self.prefix.module.named_parameters())  # other code may have replaced some
        frozen = {name: parameters[name] for name in self.chain.prefix_parameters(self.depth) if name in parameters}
        return dict(zip(frozen, sums(list(frozen.values())), strict=True))

    def update_reducer(self) -> None:
        """Tell compiled code and the strategy which parameters need gradients. Each rank must call it."""
        tell_what_trains(self._strategy, self.prefix.buffers(self.prefix.settled_depth))

    @property
    def looks_at_next_step(self) -> bool:
        """Whether the next step is the first one with this frozen prefix, in which its modules have hooks."""
        is_new = self._gated != self.prefix.version or not self._gate.is_checked
        return self.depth > 0 and is_new

    def batch_start(self, batch: Any, step: int) -> None:
        """Keep frozen modules in evaluation mode."""
        self.step = step
        self._version_before = self.prefix.version
        self.prefix.batch_start()
        if self._gated != self.prefix.version:
            self._gated = self.prefix.version
            self._gate = FrontGate(self.prefix.module, self.chain)
            self._is_compiled = is_compiled(self.prefix.module)
            self._watches, self._suspects, self._before_step, self._when_due = True, False, None, None
        if not self.depth:
            return
        if self._when_due is None:
            self._when_due = self._sums()
        if not self._is_compiled:  # a hook would compile it again
            self._gate.start(self.depth)

    def backward_end(self) -> None:
        """Drop gradients of what is frozen, or is about to be: a layer that trains in front of what is frozen."""
        if not self.ranks.several:  # else all ranks have it, and it is frozen after this step
            for appeared in self._gate.found:
                self._gate.absent[appeared].grad = None
        if self._watches and self.depth:
            self._before_step = self._sums()
        if (name := self.prefix.learning_parameter()) is not None:
            self._regained = name
            if self.ranks.several:  # they do not exchange it, and would drift apart
                self.prefix.drop_gradients()

    def batch_end(self) -> None:
        """Restore what `batch_start` set for the batch."""
        self._gate.stop()
        self.prefix.batch_end()

    def optimizer_step(self, step: int) -> None:
        """Freeze running statistics that settled with this step, and layers that train in front of what is frozen."""
        self.step = step
        if self.prefix.version != self._version_before:
            return  # the step was one with another prefix
        if self.prefix.count_step():
            self.ranks.share_buffers(self.prefix.buffers(self.depth))
            self.prefix.settle()
            self.update_reducer()
        if self.depth:
            self._judge()

    def _judge(self) -> None:
        """Follow what the gate saw in this step."""
        gate = self._gate
        found, is_open = gate.found, gate.is_open
        if self.ranks.several and gate.asks_others:
            for others, others_open in self.ranks.each([found, is_open]):
                found, is_open = {**others, **found}, is_open and others_open
        gate.step_over(is_open)
        if found:
            index = min(found.values())
            self._notices.warn(
                f"{first_of(list(found))} took no part in the first training step, and runs in front of frozen layer "
                f"modules now. It freezes with {self.chain.names[index]!r}"
            )
            self.prefix.extend(self.chain.extended(self.prefix.module, found))
            self.update_reducer()
        if gate.given is not None:
            self._notices.warn(
                f"autograd runs through the frozen layer modules, because {gate.given!r} gets an input that requires "
                "a gradient, and your program may read that gradient. They therefore save no backward pass, and "
                "checkpointing in them is off in evaluation mode. If the program does not read that gradient, leave "
                "out requires_grad_()",
                once="given",
            )

    def abort(self) -> None:
        """Do the same as `batch_end`."""
        self.batch_end()

    def close(self) -> None:
        """Unfreeze everything and restore the user's settings. Safe to call twice."""
        self.prefix.batch_end()
        self.prefix.set_depth(0)
        forget_compiled()

    def load_state_dict(self, state: Mapping[str, Any]) -> FreezingEvent | None:
        """Freeze as in ``prefix.state_dict()``, up to ``chain.max_depth``.

        Returns:
            The change, if ``chain.max_depth`` no longer allows the depth of the state; else None.
        """
        self.prefix.load_state_dict(state)
        if state["depth"]:
            self.update_reducer()
        if self.depth == state["depth"]:
            return None
        event = FreezingEvent(self.step, "unfreeze", self.depth, "freeze_until allows no more now")
        self.events.append(event)
        return event
