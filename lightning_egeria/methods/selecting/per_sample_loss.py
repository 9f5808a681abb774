"""The loss of each sample, from an unchanged training step.

A function mode sees the loss functions of `torch.nn.functional` and computes them a second time with
``reduction="none"``. The rest of the step, from the losses to what it returns, runs with gradients, which are the
weights of several losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_egeria.core.batches.onlookers import Onlooker
from lightning_egeria.core.batches.tree import tensor_leaves
from lightning_egeria.errors import PerSampleLossError

_LOSSES = {
    loss: inspect.signature(loss)
    for name, loss in vars(F).items()
    if inspect.isfunction(loss) and not name.startswith("_") and "reduction" in inspect.signature(loss).parameters
}
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float64: 1e-10}  # of the largest term
_TOLERANCE_OF_OTHERS = 1e-5
_ASK = "Compute the losses of the samples yourself"


class _Term(NamedTuple):
    name: str
    reduction: str
    reduced: Tensor  # as the step gets it, a leaf
    rows: Tensor | None  # one value for each sample
    shape: tuple[int, ...]  # without a reduction


def per_sample_losses(step: Callable[[], Any], samples: int) -> Tensor:
    """Run a training step, and return the loss of each sample. Call it without gradients of the network.

    The mean of the result is the loss that the step returned; its sum is, if the step uses losses with
    ``reduction="sum"`` only. That is checked in each call.

    A loss that mixes the samples of a batch, such as a contrastive one over a similarity matrix, cannot be told from
    others: its rows count as samples.

    Args:
        step: calls the training step; returns the loss, or a mapping with the key ``loss``.
        samples: number of samples in the batch, the first dimension of the losses.

    Returns:
        Tensor of shape ``(samples,)``, without gradient.

    Raises:
        PerSampleLossError: the loss is not the weighted sum of losses of samples: class weights, ignored targets,
            masks, losses written by hand, samples that are not the first dimension.
    """
    mode = _PerSample(samples)
    with mode:
        output = step()
    return _combined(_loss_of(output), mode.terms, samples)


def with_per_sample_losses(step: Callable[[], Any], samples: int) -> tuple[Any, Tensor]:
    """Run a training step as it is, and return what it returns with the loss of each sample.

    The step trains as without this: its graph, its values and its random numbers are the same.

    Args:
        step: calls the training step.
        samples: number of samples in the batch.

    Raises:
        PerSampleLossError: as `per_sample_losses`.
    """
    mode = _Beside(samples)
    with mode:
        output = step()
    return output, _combined(_loss_of(output), mode.terms, samples)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise PerSampleLossError(f"the training step returned no loss, expected a tensor with one value. {_ASK}")
    return loss


def _combined(loss: Tensor, terms: list[_Term], samples: int) -> Tensor:
    if not terms:
        raise PerSampleLossError(
            f"the training step used no loss function of torch.nn.functional with a mean or a sum. {_ASK}"
        )
    only_sums = all(term.reduction == "sum" for term in terms)
    weights: tuple[Tensor | None, ...] = (None,) * len(terms)
    if loss.requires_grad:
        with torch.enable_grad():
            total = loss.sum()
        weights = torch.autograd.grad(total, [term.reduced for term in terms], retain_graph=True, allow_unused=True)
    rows, size = terms[0].reduced.detach().new_zeros(samples), loss.detach().abs().double().max()
    for term, weight in zip(terms, weights, strict=True):
        if weight is not None:
            if term.rows is None:
                raise PerSampleLossError(
                    f"{term.name} gives values of shape {term.shape}, expected {samples} samples as the first "
                    f"dimension. {_ASK}"
                )
            factor = samples if term.reduction == "sum" and not only_sums else 1
            rows = rows + weight * term.rows * factor
            size = size.maximum((weight * term.reduced.detach()).abs().double())
    summed, returned = rows.double().sum() if only_sums else rows.double().mean(), loss.detach().double().sum()
    kinds = [loss.dtype, *(term.reduced.dtype for term in terms)]
    tolerance = max(_TOLERANCE.get(kind, _TOLERANCE_OF_OTHERS) for kind in kinds)
    if bool((summed - returned).abs() > tolerance * size):  # NaN and infinity are the training's own
        names = ", ".join(term.name for term in terms)
        raise PerSampleLossError(
            f"the losses of the samples ({names}) give {float(summed):.6g}, and the training step returned "
            f"{float(returned):.6g}. Class weights, ignored targets, masks and losses written by hand do this. {_ASK}"
        )
    return rows.detach()


class _Losses(Onlooker):
    """Sees the loss functions that a step calls.

    Attributes:
        terms: each loss so far.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.terms: list[_Term] = []
        self._samples = samples

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        term = _term_of(func, args, kwargs, self._samples) if func in _LOSSES else None
        return self.called(func, args, kwargs, term)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], term: _Term | None) -> Any:
        """Return the result of a call; ``term`` is its loss, None if it is none."""
        raise NotImplementedError


class _PerSample(_Losses):
    """Lets gradients flow from the losses to what the step returns, and from nothing else."""

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], term: _Term | None) -> Any:
        if term is not None:
            self.terms.append(term)
            return term.reduced
        if self.terms and any(self._leads_to_a_term(tensor) for tensor in tensor_leaves((args, kwargs))):
            with torch.enable_grad():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _leads_to_a_term(self, tensor: Tensor) -> bool:
        if not tensor.requires_grad or tensor.is_leaf:
            return any(tensor is term.reduced for term in self.terms)
        return True


class _Beside(_Losses):
    """Leaves the step as it is."""

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], term: _Term | None) -> Any:
        result = func(*args, **kwargs)
        if term is not None:
            self.terms.append(term._replace(reduced=result))
        return result


def _term_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int) -> _Term | None:
    bound = _LOSSES[func].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None  # deprecated: they stand in the place of a reduction
    reduction = given["reduction"]
    if reduction not in ("mean", "batchmean", "sum"):
        return None
    with torch.no_grad():
        reduced = func(*bound.args, **bound.kwargs)
        given["reduction"] = "none"
        values = func(*bound.args, **bound.kwargs)
    rows = None
    if values.ndim and len(values) == samples:
        rows = values.flatten(1) if values.ndim > 1 else values[:, None]
        rows = rows.mean(1) if reduction == "mean" else rows.sum(1)
    return _Term(
        func.__name__, reduction.removeprefix("batch"), reduced.detach().requires_grad_(), rows, tuple(values.shape)
    )
