"""The reference model: a snapshot of the network, run on what the network in training was given, beside a newer one."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_egeria.calls import NetworkCall, crop_calls
from lightning_egeria.compilation import eager
from lightning_egeria.freezing.precision import Lower, SnapshotNetwork
from lightning_egeria.freezing.similarity import gram_distance, tells_apart
from lightning_egeria.layers import LayerChain

Precision = Literal["auto", "int8", "bf16", "float32"]
# What lowering the precision changes may be at most this share of what is measured with it.
NOISE_SHARE = 0.1
NEGLIGIBLE = 1e-5  # of plasticity: beside it a layer module has come to rest by any standard
TIMED_RUNS = 2
# What is tried, and in which order, before float32.
_CANDIDATES: dict[Precision, tuple[Lower, ...]] = {
    "auto": ("bf16", "int8"),
    "int8": ("int8", "bf16"),
    "bf16": ("bf16",),
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What is to be compared with the reference, and on which inputs.

    Attributes:
        calls: how a training step called the network.
        network: the modules that it called, by path, with the weights of after the step.
        first: index of the first layer module that still learns.
    """

    calls: list[NetworkCall]
    network: Mapping[str, nn.Module]
    first: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What an evaluation gave.

    Attributes:
        plasticity: of each layer module: `samples` times the SP loss at its boundary, which is the mean squared change
            of a sample's likeness to the others, whatever the number of samples; NaN where it was not measured.
        samples: how many samples were compared.
        crops: whether the reference needs no more than those samples to be given.
        precision: that the reference ran in.
        reason: why in that one.
        seconds: that the evaluation took where the reference is.
    """

    plasticity: tuple[float, ...]
    samples: int
    crops: bool
    precision: str
    reason: str
    seconds: float


class ReferenceModel:
    """A copy of the network with the weights of one moment, in evaluation mode and low precision.

    Calling it makes one evaluation: how far the network of now has moved away from it. Both run in evaluation mode and
    in the same precision. What dropout does to the activations of a training step is many times what some steps do to
    them, and would hide it; and what low precision does to both cancels out where nothing has changed. So does what the
    statistics of a single batch do: batch normalisation that still learns takes those of the samples compared, the same
    for both. The running statistics of the one and the other are of different batches, however little was learned in
    between, and would put a floor under what is measured.

    A new snapshot comes along with the first evaluation that it is meant for; the low precision is made of it here, so
    that the training thread has nothing to do with it.

    Args:
        chain: the layer chain of the model.
        samples: how many samples of a batch are compared at most.
        precision: ``"auto"`` takes the fastest. Where lowering it would change plasticity by more than `NOISE_SHARE` of
            it, and by more than `NEGLIGIBLE`, a higher one steps in for good.
        crops: whether it needs no more samples than are compared, if that is known from before.
    """

    def __init__(
        self, chain: LayerChain, samples: int, precision: Precision = "auto", crops: bool | None = None
    ) -> None:
        self._chain = chain
        self._samples = samples
        self._precision = precision
        self._network: SnapshotNetwork | None = None
        self._reason = "it was asked for"
        self._lowered = False
        self._crops = crops
        self._takes_batch_statistics: bool | None = None

    def __call__(self, evaluation: Evaluation, snapshot: Mapping[str, nn.Module] | None) -> Comparison:
        """Compare.

        Args:
            evaluation: what is to be compared; the modules in it become the reference model's own.
            snapshot: the entries of the network by path, if the reference is to be taken anew; the first must come
                with the first evaluation.
        """
        with eager():  # compiling for a few forwards costs more than it saves
            return self._compare(evaluation, snapshot)

    def _compare(self, evaluation: Evaluation, snapshot: Mapping[str, nn.Module] | None) -> Comparison:
        started = time.perf_counter()
        if snapshot is not None:
            self._network = SnapshotNetwork(snapshot, self._chain, self._samples)
            self._lowered = False
        if self._network is None:
            raise RuntimeError("the first evaluation must bring a snapshot along")
        if self._crops is None:
            self._crops = self._cropping_is_safe(self._network, evaluation.calls)
        calls = crop_calls(evaluation.calls, self._samples) if self._crops else evaluation.calls
        moved = SnapshotNetwork(evaluation.network, self._chain, self._samples)
        if self._takes_batch_statistics is None and moved.batch_norms:
            self._takes_batch_statistics = _takes_batch_statistics(moved, calls)
        compare = functools.partial(
            compare_networks,
            calls=calls,
            first=evaluation.first,
            by_batch=moved.batch_norms if self._takes_batch_statistics else (),
        )
        if not self._lowered and self._precision != "float32":
            self._network, plasticity = self._lower(self._network, moved, calls, compare)
        else:
            moved = moved if self._precision == "float32" else moved.lowered(_lower_of(self._precision))
            plasticity = compare(self._network, moved)
        self._lowered = True
        return Comparison(
            plasticity=plasticity.values,
            samples=plasticity.samples,
            crops=self._crops,
            precision=self._precision,
            reason=self._reason,
            seconds=time.perf_counter() - started,
        )

    def _cropping_is_safe(self, full: SnapshotNetwork, calls: list[NetworkCall]) -> bool:
        """Whether the other samples of the batch make no difference to those that are compared."""
        wanted, batch_size = full.boundary_grams(calls)
        if batch_size <= self._samples:
            return False
        try:
            found, _ = full.boundary_grams(crop_calls(calls, self._samples))
        except Exception:  # a network that cannot take a smaller batch may raise anything; the whole batch works
            return False
        return all(
            a is not None and b is not None and a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
            for a, b in zip(wanted, found, strict=True)
        )

    def _lower(
        self, full: SnapshotNetwork, moved: SnapshotNetwork, calls: list[NetworkCall], compare: Compare
    ) -> tuple[SnapshotNetwork, NetworksCompared]:
        """The reference that is to be compared with from now on, and how far ``moved`` is from it."""
        asked, self._precision = self._precision, "float32"
        reasons = []
        wanted = compare(full, moved)
        best, found, best_seconds = full, wanted, seconds_of(full, calls) if asked == "auto" else math.inf
        full_seconds = best_seconds
        for precision in _CANDIDATES[asked]:
            try:
                low = full.lowered(precision)
                compared = compare(low, moved.lowered(precision))
            except Exception as error:  # the user's modules, and some operations know no other dtype
                reasons.append(f"the network does not run in {precision} ({type(error).__name__}: {error})")
                continue
            if any(math.isfinite(a) > math.isfinite(b) for a, b in zip(wanted.values, compared.values, strict=True)):
                reasons.append(f"in {precision} the network does not reach all boundaries")
                continue
            share = noise_share(wanted.values, compared.values)
            if share > NOISE_SHARE:
                reasons.append(f"{precision} changes plasticity by {share:.0%}")
                continue
            seconds = seconds_of(low, calls) if asked == "auto" else 0.0
            if asked == "auto":
                speed = f"is {full_seconds / seconds:.1f} times as fast as float32 here"
                reasons.append(f"{precision} {speed} and changes plasticity by {share:.1%}")
            if seconds < best_seconds:
                best, found, best_seconds, self._precision = low, compared, seconds, precision
            if asked != "auto":
                break
        self._reason = "; ".join(reasons) or self._reason
        return best, found


@dataclasses.dataclass(frozen=True)
class NetworksCompared:
    """Plasticity of each layer module, and how many samples it is of."""

    values: tuple[float, ...]
    samples: int


Compare = Callable[[SnapshotNetwork, SnapshotNetwork], NetworksCompared]


def compare_networks(
    reference: SnapshotNetwork,
    moved: SnapshotNetwork,
    calls: list[NetworkCall],
    first: int,
    by_batch: Collection[str] = (),
) -> NetworksCompared:
    """Plasticity of each layer module from number ``first`` on, NaN before.

    Args:
        reference: the one.
        moved: the other.
        calls: what both are run on.
        first: layer module that still learns.
        by_batch: paths of the batch normalisation that goes by the statistics of what it is given.
    """
    before, _ = reference.boundary_grams(calls, first, by_batch)
    after, _ = moved.boundary_grams(calls, first, by_batch)
    samples = max((gram.shape[0] for gram in after if gram is not None), default=0)
    return NetworksCompared(tuple(samples * value for value in distances(before, after)), samples)


def _takes_batch_statistics(network: SnapshotNetwork, calls: list[NetworkCall]) -> bool:
    """Whether its batch normalisation does without running statistics; that of others may read them in any case."""
    try:
        network.boundary_grams(calls, by_batch=network.batch_norms)
    except Exception:  # classes of the user's own may raise anything
        return False
    return True


def _lower_of(precision: Precision) -> Lower:
    assert precision in ("bf16", "int8")
    return precision


def distances(first: list[Tensor | None], second: list[Tensor | None]) -> tuple[float, ...]:
    """SP loss between the Gram matrices of each boundary; NaN where there is nothing to compare.

    That is where one is missing, the sizes differ, or both are the same for every sample: a loss of zero between two
    that cannot tell samples apart, or have but one, would look like convergence.
    """
    return tuple(
        math.nan
        if a is None or b is None or a.shape != b.shape or not (tells_apart(a) or tells_apart(b))
        else float(gram_distance(a, b))
        for a, b in zip(first, second, strict=True)
    )


def noise_share(plasticity: tuple[float, ...], noisy: tuple[float, ...]) -> float:
    """The largest share by which a plasticity is another in low precision, over the boundaries that were measured.

    A difference below `NEGLIGIBLE` is none.

    >>> noise_share((1.0, 0.0, math.nan), (1.25, 0.5 * NEGLIGIBLE, math.nan))
    0.25
    """
    pairs = [(p, abs(n - p)) for p, n in zip(plasticity, noisy, strict=True) if math.isfinite(p)]
    return max((noise / p if p else math.inf for p, noise in pairs if noise > NEGLIGIBLE), default=0.0)


def seconds_of(network: SnapshotNetwork, calls: list[NetworkCall]) -> float:
    """Shortest of a few runs."""
    return min(_timed(network, calls) for _ in range(TIMED_RUNS))


def _timed(network: SnapshotNetwork, calls: list[NetworkCall]) -> float:
    started = time.perf_counter()
    network.boundary_grams(calls)
    return time.perf_counter() - started
