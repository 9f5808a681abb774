"""Private names of Lightning."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.trainer.connectors.data_connector import (
    _check_dataloader_iterable,
    _DataHookSelector,
    _DataLoaderSource,
)
from lightning.pytorch.trainer.states import RunningStage

from lightning_egeria.upstream.needs import lacking

_FRAMES = 18  # from a loop to the iterator of a loader


def is_asked_by_loop() -> bool:
    """Whether a loop of Lightning asks for a loader or its iterator, and not a callback or the user's code."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if isinstance(frame.f_locals.get("self"), (_DataFetcher, _DataLoaderSource)):
            return True
        frame = frame.f_back
    return False


def is_asked_whether_iterable() -> bool:
    """Whether the ``__iter__`` that asks this was called only to see whether there is one."""
    return sys._getframe(2).f_code is _check_dataloader_iterable.__code__


def prepared(trainer: Any, loader: Any, trains: bool = True) -> Any:
    """Return a loader as the Trainer would use it to train or to validate: with the sampler of a distributed run."""
    stage = RunningStage.TRAINING if trains else RunningStage.VALIDATING
    return trainer._data_connector._prepare_dataloader(loader, trains, stage)


def let_hooks_belong_to(trainer: Any, datamodule: Any) -> None:
    """Let the Trainer choose between the hooks of the model and those of a data module; None: there is none."""
    selector = trainer._data_connector._datahook_selector
    if selector is not None:
        selector.datamodule = datamodule


class _AlwaysTheModule(_DataHookSelector):
    def get_instance(self, hook_name: str) -> Any:
        return self.datamodule


def let_batches_go_to(trainer: Any, datamodule: Any) -> None:
    """Leave all hooks for batches to a data module, which asks for the `chosen_hook` itself."""
    connector = trainer._data_connector
    if connector._datahook_selector is not None:
        connector._datahook_selector = _AlwaysTheModule(connector._datahook_selector.model, datamodule)


def chosen_hook(module: Any, datamodule: Any, name: str) -> Any:
    """Return the hook for batches that Lightning chooses between a model and a data module, if there is one."""
    return getattr(_DataHookSelector(module, datamodule).get_instance(name), name)


def data_fetcher(trainer: Any) -> Any:
    """Return what hands batches to the training loop; None before the first epoch."""
    return trainer.fit_loop._data_fetcher


def set_data_fetcher(trainer: Any, fetcher: Any) -> None:
    """Let another object hand batches to the training loop."""
    trainer.fit_loop._data_fetcher = fetcher


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader the number of the epoch."""
    _set_sampler_epoch(loader, epoch)


def data_source(trainer: Any) -> Any:
    """Return what the training loop asks for its loaders."""
    return trainer.fit_loop._data_source


def set_data_source(trainer: Any, source: Any) -> None:
    """Let the training loop ask another object for its loaders."""
    trainer.fit_loop._data_source = source


def combined_loader(trainer: Any) -> Any:
    """Return the training loaders of a Trainer, joined; None before the first epoch."""
    return trainer.fit_loop._combined_loader


def loaders_keep_their_place(trainer: Any) -> bool:
    """Whether a training loader has a state of its own. It is not asked for it, which may start its workers."""
    loaders = combined_loader(trainer)
    return loaders is not None and any(hasattr(one, "load_state_dict") for one in loaders.flattened)


def is_accumulating(trainer: Any) -> bool:
    """Whether the batch in progress ends without an optimizer step."""
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


def logging_step(trainer: Any) -> int:
    """Return the step that Lightning logs its metrics at."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def count_logging_step(trainer: Any) -> None:
    """Count a step as Lightning does after each one."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1


def only_recomputes_statistics(trainer: Any) -> bool:
    """Whether training is over, and stochastic weight averaging runs the data once more for running statistics."""
    return bool(trainer.fit_loop._skip_backward)


def logs_hyperparameters(datamodule: Any) -> bool:
    """Whether Lightning logs the hyperparameters of a data module."""
    return bool(datamodule._log_hyperparams)


def set_logs_hyperparameters(datamodule: Any, value: bool) -> None:
    """Set whether Lightning logs the hyperparameters of a data module."""
    datamodule._log_hyperparams = value


def missing(trainer: Any) -> list[str]:
    """Return the private names that the Lightning of a Trainer lacks."""
    found = lacking(trainer, ["_data_connector"])
    if not found:
        found = lacking(trainer._data_connector, ["_prepare_dataloader", "_datahook_selector"])
    found += lacking(trainer.fit_loop, ["_data_fetcher", "_data_source", "_combined_loader", "_skip_backward"])
    found += lacking(trainer.fit_loop.epoch_loop, ["_should_accumulate", "_batches_that_stepped"])
    module = trainer.lightning_module
    return found if module is None else found + lacking(module, ["_compiler_ctx"])
