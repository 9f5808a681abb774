"""Repeating the last training steps from where they began, at other frozen depths."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_egeria.batches.tree import tensor_leaves
from lightning_egeria.snapshots.module_attributes import ModuleAttributes
from lightning_egeria.snapshots.random_state import RandomState, preserved_random_state
from lightning_egeria.snapshots.training_state import TrainingState
from lightning_egeria.training.freezer import Freezer
from lightning_egeria.training.observers import Observer
from lightning_egeria.training.rehearsal import rehearsal, with_callbacks

MOST_BYTES = 2**30  # of kept batches


@dataclasses.dataclass
class _Batch:
    """One call of the training step.

    Attributes:
        batch: its first argument, a copy in host memory.
        index: its second argument.
        step: number of optimizer steps before it.
        counters: of the training loop and of schedulers before it.
        random: random state before it.
        settings: of each parameter group before it.
        stepped: whether the optimizer stepped with it.
        loss: loss of this batch in the run, divided by the number of accumulated batches.
    """

    batch: Any
    index: int
    step: int
    counters: list[Any]
    random: RandomState
    settings: list[dict[str, Any]]
    stepped: bool = False
    loss: Tensor | None = None


class Branches(Observer):
    """Keeps the batches of training from now on, and repeats the steps from this moment at other frozen depths.

    A branch takes the same batches, random numbers, learning rates, attributes of modules and numbers of steps as the
    run did, through the user's ``training_step``, precision, gradient clipping and ``optimizer_step``, so it ends where
    the run would have ended, had it frozen to that depth at this moment. Callbacks do not see it, and ``self.log`` does
    nothing in it. Create it between two optimizer steps with automatic optimization, and pass on the moments of
    training.

    Args:
        trainer: the Trainer.
        freezer: freezer of the model, at depth 0.
    """

    def __init__(self, trainer: pl.Trainer, freezer: Freezer) -> None:
        self._trainer = trainer
        self._freezer = freezer
        self._parent = self._state()
        self._attributes = ModuleAttributes(freezer.prefix.module, without=("_buffers", "log", "log_dict"))
        self._batches: list[_Batch] = []
        self._bytes = 0

    @staticmethod
    def possible(trainer: pl.Trainer) -> bool:
        """Whether the steps of this run can be repeated: automatic optimization, and a step that takes a batch."""
        module = trainer.lightning_module
        takes_iterator = is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
        return module.automatic_optimization and not takes_iterator

    @property
    def steps(self) -> int:
        """Number of optimizer steps since this was created."""
        return sum(kept.stepped for kept in self._batches)

    @property
    def batches(self) -> int:
        """Number of batches since this was created."""
        return len(self._batches)

    @property
    def full(self) -> bool:
        """Whether the kept batches have as many bytes as they may."""
        return self._bytes >= MOST_BYTES

    @property
    def losses(self) -> list[float]:
        """Loss of each batch so far in the run, the mean of all ranks. Every rank must read it."""
        return self._mean([_number(kept.loss) for kept in self._batches])

    def batch_start(self, batch: Any, step: int) -> None:
        """Keep a copy of the batch."""
        kept = move_data_to_device(copy.deepcopy(batch), torch.device("cpu"))
        self._bytes += sum(leaf.nbytes for leaf in tensor_leaves(kept))
        index = self._trainer.fit_loop.epoch_loop.batch_idx
        counters = [copy.deepcopy(one.state_dict()) for one in self._counters()]
        self._batches.append(_Batch(kept, index, step, counters, RandomState.current(), self._settings()))

    def forward_end(self, loss: Tensor) -> None:
        """Note the loss of the run."""
        if self._batches:
            scaler = _scaler(self._trainer)
            self._batches[-1].loss = loss.detach() / (scaler.get_scale() if scaler is not None else 1)

    def stepped(self) -> None:
        """Note that the optimizer stepped with the last batch."""
        if self._batches:
            self._batches[-1].stepped = True

    @contextlib.contextmanager
    def repeating(self) -> Iterator[Repeats]:
        """Let the body repeat the steps. On exit training goes on from the branch kept last, or from the run.

        The frozen depth is then that of the run; freeze to that of the branch next. Every rank must call it.
        """
        freezer, settings = self._freezer, self._settings()
        counters = [copy.deepcopy(one.state_dict()) for one in self._counters()]
        prefix, run = freezer.prefix, freezer.prefix.state_dict()
        repeats = Repeats(self, self._state())
        try:
            prefix.set_depth(0)
            with rehearsal(prefix.module), with_callbacks(self._trainer):
                try:
                    yield repeats
                finally:
                    prefix.set_depth(0)
        finally:
            with preserved_random_state():
                repeats.best.restore()
            self._set(settings)
            self._count(counters)
            prefix.load_state_dict(run)
            freezer.update_reducer()

    def _mean(self, losses: list[float]) -> list[float]:
        return self._freezer.ranks.mean(losses)

    def _state(self) -> TrainingState:
        scaler = _scaler(self._trainer)
        others = [scaler] if scaler is not None else []
        return TrainingState(self._trainer.lightning_module, self._trainer.optimizers, others)

    def _settings(self) -> list[dict[str, Any]]:
        return [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for optimizer in self._trainer.optimizers
            for group in optimizer.param_groups
        ]

    def _set(self, settings: list[dict[str, Any]]) -> None:
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        for group, values in zip(groups, settings, strict=True):
            group.update(copy.deepcopy(values))

    def _counters(self) -> list[Any]:
        """What counts epochs, batches and steps: ``trainer.global_step`` and ``current_epoch`` follow from it."""
        loop = self._trainer.fit_loop
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        inner = loop.epoch_loop.batch_progress, loop.epoch_loop.automatic_optimization.optim_progress
        return [loop.epoch_progress, *inner, *schedulers]

    def _count(self, states: list[Any]) -> None:
        for counter, state in zip(self._counters(), states, strict=True):
            counter.load_state_dict(copy.deepcopy(state))

    def _from_start(self, depth: int) -> None:
        """Return to the moment of the start, and freeze."""
        prefix = self._freezer.prefix
        prefix.set_depth(0)
        self._attributes.restore()
        self._parent.restore()
        if depth:
            self._freezer.ranks.share_buffers(prefix.buffers(depth))
            prefix.set_depth(depth)
        self._freezer.update_reducer()

    def _call(self, number: int) -> Tensor | None:
        """Call the training step on a batch and return the loss, divided as in the run; None if it returned none."""
        kept, trainer = self._batches[number], self._trainer
        training_step = trainer.lightning_module.training_step
        kept.random.restore()
        batch = move_data_to_device(copy.deepcopy(kept.batch), trainer.strategy.root_device)
        takes_index = is_param_in_hook_signature(training_step, "batch_idx", min_args=2)
        output = trainer.strategy.training_step(*((batch, kept.index) if takes_index else (batch,)))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        return None if loss is None else loss / trainer.accumulate_grad_batches

    def _repeat(self, number: int) -> float:
        """Train on a batch and return its loss."""
        kept, trainer, freezer = self._batches[number], self._trainer, self._freezer
        module = trainer.lightning_module
        optimizer: Any = module.optimizers()
        losses: list[float] = []
        self._set(kept.settings)
        self._count(kept.counters)
        freezer.batch_start(kept.batch, kept.step)

        def closure() -> Tensor | None:
            loss = self._call(number)
            if number == 0 or self._batches[number - 1].stepped:
                module.optimizer_zero_grad(trainer.current_epoch, kept.index, optimizer.optimizer)
            losses.append(_number(loss))
            if loss is not None:
                trainer.strategy.backward(loss, optimizer.optimizer)
                freezer.backward_end()
            return loss

        if kept.stepped:
            module.optimizer_step(trainer.current_epoch, kept.index, optimizer, closure)
        else:
            closure()
        freezer.batch_end()
        if kept.stepped:
            freezer.optimizer_step(kept.step + 1)
        return losses[-1]


class Repeats:
    """Repeats the steps of `Branches`, within ``with branches.repeating()``. Every rank must make the same calls.

    Attributes:
        best: the state that training goes on from.
    """

    def __init__(self, branches: Branches, run: TrainingState) -> None:
        self.best = run
        self._branches = branches

    def at(self, depth: int) -> list[float]:
        """Repeat all steps at a depth and return the loss of each batch, the mean of all ranks."""
        branches = self._branches
        branches._from_start(depth)
        return branches._mean([branches._repeat(number) for number in range(len(branches._batches))])

    def keep(self) -> None:
        """Let training go on from the branch of the last `at`, if no other is kept later."""
        self.best = self._branches._state()


def _scaler(trainer: pl.Trainer) -> Any:
    """Return the gradient scaler of half-precision training; None without one."""
    return getattr(trainer.precision_plugin, "scaler", None)


def _number(loss: Tensor | None) -> float:
    return float("nan") if loss is None else float(loss.detach())
