"""The reference model: a snapshot of the network, compared with a newer one on the same inputs."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_egeria.core.network.calls import NetworkCall, crop_calls
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.compilation import eager
from lightning_egeria.freezing.precision import Lower, SnapshotNetwork
from lightning_egeria.freezing.similarity import gram_distance, tells_apart

Precision = Literal["auto", "int8", "bf16", "float32"]
NOISE_SHARE = 0.1  # a lower precision may change plasticity by this share of it
NEGLIGIBLE = 1e-5  # a plasticity this low counts as converged with any tolerance
TIMED_RUNS = 2
ROUNDING_SHARE = 0.01  # of the largest output: devices round differently, and TF32 by about 0.001
_Measure = Callable[[SnapshotNetwork, SnapshotNetwork], tuple[tuple[float, ...], int]]
# Precisions to try before float32, in order.
_CANDIDATES: dict[Precision, tuple[Lower, ...]] = {
    "auto": ("bf16", "int8"),
    "int8": ("int8", "bf16"),
    "bf16": ("bf16",),
}


@dataclasses.dataclass(frozen=True)
class EvaluationRequest:
    """The request for an evaluation: a network to compare with the reference, and its inputs.

    Attributes:
        calls: calls that a training step made to the network.
        network: the called modules by path, with the weights after the step.
        first: index of the first layer module that still trains.
        expected: outputs of these calls in the training process, in evaluation mode and float32, to compare with those
            where the reference runs; None compares nothing.
    """

    calls: list[NetworkCall]
    network: Mapping[str, nn.Module]
    first: int
    expected: list[Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation.

    Attributes:
        plasticity: plasticity of each layer module: `samples` times the SP loss at its boundary, the mean squared
            change of a sample's similarity to the others. It does not depend on the number of samples. NaN where not
            measured.
        samples: number of compared samples.
        crops: whether the reference needs only these samples of the batch.
        precision: precision of the reference.
        reason: why this precision.
        seconds: seconds that the evaluation took.
        differs: largest difference from the expected outputs, as a share of their largest value; 0 for rounding.
    """

    plasticity: tuple[float, ...]
    samples: int
    crops: bool
    precision: str
    reason: str
    seconds: float
    differs: float = 0.0


class ReferenceModel:
    """A copy of the network with the weights of one moment, in evaluation mode and low precision.

    A call makes one evaluation: it measures how far the current network has moved from this copy. Both run in
    evaluation mode, because dropout changes activations many times more than a few training steps do. Both run in the
    same precision, so that rounding cancels out where nothing has changed. Batch normalisation that still trains uses
    the statistics of the compared samples in both. Running statistics would come from different batches, and their
    difference would hide small changes.

    A new snapshot comes with its first evaluation. The reference itself lowers the precision of the snapshot, which
    spares the training thread that work.

    Args:
        chain: layer chain of the model.
        samples: largest number of samples of a batch to compare.
        precision: ``"auto"`` takes the fastest. A precision that changes plasticity by more than `NOISE_SHARE` of it,
            and by more than `NEGLIGIBLE`, gives way to a higher one for good.
        crops: whether the reference needs only the compared samples of a batch; None finds out.
        reason: why this precision, unless it is ``"auto"``.
    """

    def __init__(
        self,
        chain: LayerChain,
        samples: int,
        precision: Precision = "auto",
        crops: bool | None = None,
        reason: str = "as requested",
    ) -> None:
        self._chain = chain
        self._samples = samples
        self._precision = precision
        self._network: SnapshotNetwork | None = None
        self._reason = reason
        self._lowered = False
        self._crops = crops
        self._takes_batch_statistics: bool | None = None

    def __call__(self, evaluation: EvaluationRequest, snapshot: Mapping[str, nn.Module] | None) -> EvaluationResult:
        """Compare a network with the reference.

        Args:
            evaluation: the network and its inputs; the reference changes these modules in place.
            snapshot: modules of a new reference by path; None keeps the reference. The first evaluation needs one.

        Raises:
            RuntimeError: if the first evaluation has no snapshot.
        """
        with eager():  # compiling for a few forwards costs more than it saves
            return self._compare(evaluation, snapshot)

    def outputs(self, evaluation: EvaluationRequest) -> list[Tensor]:
        """Return what the network returns in evaluation mode and float32; changes its modules in place."""
        with eager():
            network = SnapshotNetwork(evaluation.network, self._chain, self._samples)
            return [output for call in network.outputs(evaluation.calls) for output in call]

    def _compare(self, evaluation: EvaluationRequest, snapshot: Mapping[str, nn.Module] | None) -> EvaluationResult:
        started = time.perf_counter()
        if snapshot is not None:
            self._network = SnapshotNetwork(snapshot, self._chain, self._samples)
            self._lowered = False
        if self._network is None:
            raise RuntimeError("the first evaluation needs a snapshot")
        if self._crops is None:
            self._crops = self._cropping_is_safe(self._network, evaluation.calls)
        calls = crop_calls(evaluation.calls, self._samples) if self._crops else evaluation.calls
        moved = SnapshotNetwork(evaluation.network, self._chain, self._samples)
        differs = _difference(moved, evaluation.calls, evaluation.expected) if evaluation.expected is not None else 0.0
        if self._takes_batch_statistics is None and moved.batch_norms:
            self._takes_batch_statistics = _takes_batch_statistics(moved, calls)
        measure = functools.partial(
            plasticity_between,
            calls=calls,
            first=evaluation.first,
            by_batch=moved.batch_norms if self._takes_batch_statistics else (),
        )
        if not self._lowered and self._precision != "float32":
            self._network, (plasticity, samples) = self._lower(self._network, moved, calls, measure)
        else:
            moved = moved if self._precision == "float32" else moved.lowered(_lower_of(self._precision))
            plasticity, samples = measure(self._network, moved)
        self._lowered = True
        return EvaluationResult(
            plasticity=self._chain.over_left_out(plasticity),
            samples=samples,
            crops=self._crops,
            precision=self._precision,
            reason=self._reason,
            seconds=time.perf_counter() - started,
            differs=differs,
        )

    def _cropping_is_safe(self, full: SnapshotNetwork, calls: list[NetworkCall]) -> bool:
        """Whether the compared samples give the same result without the rest of the batch."""
        wanted, batch_size = full.boundary_grams(calls)
        if batch_size <= self._samples:
            return False
        try:
            found, _ = full.boundary_grams(crop_calls(calls, self._samples))
        except Exception:  # a network may not take a smaller batch; the whole batch works
            return False
        return all(
            a is not None and b is not None and a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
            for a, b in zip(wanted, found, strict=True)
        )

    def _lower(
        self, full: SnapshotNetwork, moved: SnapshotNetwork, calls: list[NetworkCall], measure: _Measure
    ) -> tuple[SnapshotNetwork, tuple[tuple[float, ...], int]]:
        """Choose the precision; return the reference in it, with the plasticity and the number of samples."""
        asked, self._precision = self._precision, "float32"
        reasons = []
        wanted = measure(full, moved)
        best, found, best_seconds = full, wanted, seconds_of(full, calls) if asked == "auto" else math.inf
        full_seconds = best_seconds
        for precision in _CANDIDATES[asked]:
            try:
                low = full.lowered(precision)
                measured = measure(low, moved.lowered(precision))
            except Exception as error:  # the user's modules may raise anything, and some operations have no other dtype
                reasons.append(f"the network fails in {precision} ({type(error).__name__}: {error})")
                continue
            if precision == "int8" and low.fallback is not None:
                reasons.append(low.fallback)
                if not low.runs_in_int8:
                    continue
            if any(math.isfinite(a) > math.isfinite(b) for a, b in zip(wanted[0], measured[0], strict=True)):
                reasons.append(f"in {precision}, some boundary activations are not finite")
                continue
            share = noise_share(wanted[0], measured[0])
            if share > NOISE_SHARE:
                reasons.append(f"{precision} changes plasticity by {share:.0%}")
                continue
            seconds = seconds_of(low, calls) if asked == "auto" else 0.0
            if asked == "auto":
                speed = f"is {full_seconds / seconds:.1f} times as fast as float32"
                reasons.append(f"{precision} {speed} and changes plasticity by {share:.1%}")
            if seconds < best_seconds:
                best, found, best_seconds, self._precision = low, measured, seconds, precision
            if asked != "auto":
                break
        self._reason = "; ".join(reasons) or self._reason
        return best, found


def plasticity_between(
    reference: SnapshotNetwork,
    moved: SnapshotNetwork,
    calls: list[NetworkCall],
    first: int,
    by_batch: Collection[str] = (),
) -> tuple[tuple[float, ...], int]:
    """Return the plasticity of each layer module, NaN before index ``first``, and the number of compared samples.

    Args:
        reference: the earlier network.
        moved: the current network.
        calls: calls to make to both.
        first: index of the first layer module that still trains.
        by_batch: paths of batch normalisation modules that use the statistics of the batch.
    """
    before, _ = reference.boundary_grams(calls, first, by_batch)
    after, _ = moved.boundary_grams(calls, first, by_batch)
    samples = max((gram.shape[0] for gram in after if gram is not None), default=0)
    return tuple(samples * value for value in distances(before, after)), samples


def _difference(network: SnapshotNetwork, calls: list[NetworkCall], expected: list[Tensor]) -> float:
    """Return the largest difference from the expected outputs as a share of their largest value; 0 for rounding.

    A network that draws random numbers has no expected outputs.
    """
    first: list[Tensor] = []
    again: list[Tensor] = []
    for seed, outputs in enumerate((first, again)):
        torch.manual_seed(seed)
        outputs.extend(output for call in network.outputs(calls) for output in call)
    if len(first) != len(expected) or not all(map(torch.equal, first, again)):
        return 0.0
    pairs = [(found.double(), wanted.double()) for found, wanted in zip(first, expected, strict=True)]
    if any(found.shape != wanted.shape for found, wanted in pairs):
        return 1.0
    largest = max((float(wanted.abs().max()) for _, wanted in pairs if wanted.numel()), default=0.0)
    difference = max((float((found - wanted).abs().max()) for found, wanted in pairs if wanted.numel()), default=0.0)
    share = difference / largest if largest else difference
    return share if share > ROUNDING_SHARE else 0.0


def _takes_batch_statistics(network: SnapshotNetwork, calls: list[NetworkCall]) -> bool:
    """Whether the network runs with the statistics of the batch; a custom batch normalisation may need its own."""
    try:
        network.boundary_grams(calls, by_batch=network.batch_norms)
    except Exception:  # the user's classes may raise anything
        return False
    return True


def _lower_of(precision: Precision) -> Lower:
    assert precision in ("bf16", "int8")
    return precision


def distances(first: list[Tensor | None], second: list[Tensor | None]) -> tuple[float, ...]:
    """Return the SP loss between the Gram matrices of each boundary; NaN where they cannot be compared.

    That is where one is missing, their sizes differ, or both are the same for every sample. Two networks that cannot
    tell samples apart have a loss of zero, which would look like convergence.
    """
    return tuple(
        math.nan
        if a is None or b is None or a.shape != b.shape or not (tells_apart(a) or tells_apart(b))
        else float(gram_distance(a, b))
        for a, b in zip(first, second, strict=True)
    )


def noise_share(plasticity: tuple[float, ...], noisy: tuple[float, ...]) -> float:
    """Return the largest relative error of plasticity in low precision over the measured boundaries.

    A difference below `NEGLIGIBLE` does not count.

    >>> noise_share((1.0, 0.0, math.nan), (1.25, 0.5 * NEGLIGIBLE, math.nan))
    0.25
    """
    pairs = [(p, abs(n - p)) for p, n in zip(plasticity, noisy, strict=True) if math.isfinite(p)]
    return max((noise / p if p else math.inf for p, noise in pairs if noise > NEGLIGIBLE), default=0.0)


def seconds_of(network: SnapshotNetwork, calls: list[NetworkCall]) -> float:
    """Return the seconds of the fastest of a few runs."""
    return min(_timed(network, calls) for _ in range(TIMED_RUNS))


def _timed(network: SnapshotNetwork, calls: list[NetworkCall]) -> float:
    started = time.perf_counter()
    network.boundary_grams(calls)
    return time.perf_counter() - started
