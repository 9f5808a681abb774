"""Metrics in a training step: calls on micro-batches in one process become one call on the batch in each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from lightning_egeria.errors import UnsupportedError

Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""Path of a metric, its method, and what that got."""
_KEPT = (str, bool, type(None))
_METHODS = ("forward", "update", "compute", "reset")


class MetricCalls:
    """Takes down the calls of a module's metrics, which keep their state meanwhile.

    Args:
        module: its metrics are those that it has now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = {
            path: metric for path, metric in module.named_modules() if isinstance(metric, Metric | MetricCollection)
        }
        self._twins = {path: metric.clone() for path, metric in self._metrics.items()}
        self._paths = {id(metric): path for path, metric in self._metrics.items()}

    def path(self, metric: Any) -> str | None:
        """Return the path of a metric; None for another value."""
        return self._paths.get(id(metric))

    @contextlib.contextmanager
    def taken(self, receive: Callable[[Call], None]) -> Iterator[None]:
        """Pass on calls instead of updating metrics; a call of a metric returns the value of its arguments alone.

        Raises:
            UnsupportedError: at ``compute`` and ``reset``, for which a micro-batch is too early.
        """
        before = [
            (metric, {name: vars(metric)[name] for name in _METHODS if name in vars(metric)})
            for metric in self._metrics.values()
        ]
        for path, metric in self._metrics.items():
            for name in _METHODS:
                vars(metric)[name] = functools.partial(self._take, receive, path, name)
        try:
            yield
        finally:
            for metric, own in before:
                for name in _METHODS:
                    del vars(metric)[name]
                vars(metric).update(own)

    def _take(self, receive: Callable[[Call], None], path: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if name in ("compute", "reset"):
            raise UnsupportedError(
                f"training_step calls {name}() of the metric {path!r}, which has the batch only after the step. Log "
                "the metric itself, or call it in a hook such as on_train_epoch_end"
            )
        receive((path, name, args, kwargs))
        if name == "update":
            return None
        twin = self._twins[path]
        twin.reset()
        return twin(*args, **kwargs)

    def repeat(self, micro_batches: Sequence[Sequence[Call]]) -> None:
        """Call the metrics with the arguments of all micro-batches.

        Rows and lists are joined to one call, as of one process. A call with a number is made for each micro-batch.

        Args:
            micro_batches: the calls of each.
        """
        kinds = [[call[:2] for call in calls] for calls in micro_batches]
        groups = list(zip(*micro_batches, strict=True)) if all(one == kinds[0] for one in kinds) else []
        for path, name, given in [found for group in groups for found in _joined(group)] or [
            (path, name, (args, kwargs)) for calls in micro_batches for path, name, args, kwargs in calls
        ]:
            metric: Any = self._metrics[path]
            (metric if name == "forward" else metric.update)(*given[0], **given[1])


def _joined(calls: Sequence[Call]) -> list[tuple[str, str, Any]]:
    path, name, _, _ = calls[0]
    given = [call[2:] for call in calls]
    try:
        return [(path, name, _join(given))]
    except ValueError:
        return [(path, name, one) for one in given]


def _join(values: Sequence[Any]) -> Any:
    """Join the same argument of several calls.

    >>> _join([(torch.ones(1), None), (torch.zeros(2), None)])
    (tensor([1., 0., 0.]), None)
    """
    first = values[0]
    if any(type(one) is not type(first) for one in values):
        raise ValueError
    if isinstance(first, Tensor) and first.ndim:
        try:
            return torch.cat(list(values))
        except RuntimeError as error:  # other shapes
            raise ValueError from error
    if isinstance(first, list):
        return [item for one in values for item in one]
    if isinstance(first, tuple):
        return tuple(map(_join, zip(*values, strict=True)))
    if isinstance(first, Mapping) and all(one.keys() == first.keys() for one in values):
        return {key: _join([one[key] for one in values]) for key in first}
    if isinstance(first, _KEPT) and all(one == first for one in values):
        return first
    raise ValueError


def kept(call: Call) -> Call:
    """Return a call with tensors as they are now, without their history."""
    path, name, *given = call
    args, kwargs = pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, given)
    return path, name, tuple(args), kwargs
