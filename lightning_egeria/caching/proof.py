"""Whether a cached boundary activation can stand for the prefix: tried on the calls of a real training step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_egeria.batches.tree import change_leaves, tensor_leaves
from lightning_egeria.caching.bypass import BoundaryReachedError, Passage, PrefixBypass, rows_of
from lightning_egeria.caching.findings import kept_random_state, random_state, same_random_state, seed_all
from lightning_egeria.caching.levels import RowForm, pieces_of
from lightning_egeria.caching.samples import same_leaf, stand_in_tensor
from lightning_egeria.network.calls import EarlierOutput, NetworkCall
from lightning_egeria.network.compilation import eager
from lightning_egeria.network.forwards import Forward, ForwardReplacements

# Rows of a batch are computed alike up to rounding: of the largest value, in units of the dtype's resolution.
ROUNDING = 64
MORE_LENGTHS = 5  # that are tried, of those that the samples of a batch have
NO_ROWS = "the boundary activation does not have the samples of the batch in its first dimension"


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was found.

    Attributes:
        problem: why no cached activation can stand for this prefix; None if one can.
        repairable: whether a shallower boundary may do better.
        without_input: whether the network's result is the same if the input is not there.
        exact: whether the activation of a sample is the same, bit for bit, at each place of a batch.
        sizes: of batches in which it is the same, bit for bit.
        ragged: whether the activation has as many positions as the samples are padded to.
        padding_comes_out: whether what the network gives behind the end of a sample depends on what is cached there.
        again: another batch is needed.
    """

    problem: str | None
    repairable: bool = False
    without_input: bool = False
    exact: bool = True
    sizes: frozenset[int] = frozenset()
    ragged: bool = False
    padding_comes_out: bool = False
    again: bool = False


class Prover:
    """Runs the network several times on the calls of one training step; leaves buffers and random numbers as they were.

    Args:
        modules: of the model in training, by path.
        bypass: of the prefix.
        calls: that the training step made of the network, with copies of the arguments.
        passage: of that step.
        input_leaf: number of the tensor, among the first call's arguments, that would not be loaded; None: all are.
        autocast: device type and dtype of the autocast that the step ran in; None: it did not.
        compiled: whether the network is; then it must also run compiled.
        lengths: of the samples, if they differ.
        length: that they are padded to.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        bypass: PrefixBypass,
        calls: list[NetworkCall],
        passage: Passage,
        input_leaf: int | None,
        autocast: tuple[str, torch.dtype] | None,
        compiled: bool,
        lengths: Sequence[int] | None = None,
        length: int | None = None,
    ) -> None:
        self._modules = modules
        self._bypass = bypass
        self._calls = list(calls)
        self._samples = passage.samples or 0
        self._input_leaf = input_leaf
        self._autocast = autocast
        self._compiled = compiled
        self._lengths = np.asarray(lengths) if lengths is not None else None
        self._length = length
        self._padding_comes_out = False
        self._drew = False
        devices = {tensor.device for call in calls for tensor in tensor_leaves((call.args, call.kwargs))}
        self._gpus = [device for device in devices if device.type == "cuda"]

    def prove(self, computed: Tensor) -> Proof:
        """Try it; ``computed`` is the boundary activation of the step itself."""
        with self._undone(), self._in_autocast(), self._alone():  # which ends after the bypass: both replace forwards
            try:
                with torch.no_grad(), eager(), _NoTalk():  # type: ignore[no-untyped-call]
                    proof = self._prove(computed)
                if proof.problem is None and self._compiled:
                    self._run_compiled()
            except _RowsDifferError as error:
                return Proof(str(error), True)
            except (_NotCompiledError, _TalksError) as error:
                return Proof(str(error))
            except Exception as error:  # the user's modules may raise anything
                return Proof(f"the network cannot be run a second time ({type(error).__name__}: {_first_line(error)})")
            finally:
                self._bypass.end()
        return proof

    def _run_compiled(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the compiler are not about the user's code
            try:
                self._outputs(self._calls, Passage(), None)
            except Exception as error:  # whatever the compiler raises
                raise _NotCompiledError(
                    "the network is compiled in one piece (fullgraph=True?), so nothing of it can be left out "
                    f"({type(error).__name__}: {_first_line(error)})"
                ) from error

    def _prove(self, computed: Tensor) -> Proof:
        activation = self._boundary(self._calls, seed=1)
        if activation is None or not activation.ndim or activation.shape[0] != self._samples:
            return Proof(NO_ROWS, True)
        again = self._boundary(self._calls, seed=2)
        if again is None or not same_leaf(activation, again):
            return Proof("the frozen layers give other results each time they run", True)
        if self._drew:  # what comes of it may be rare
            return Proof("the frozen layers draw random numbers, or the code between them does", True)
        exact, sizes = self._sizes(activation)
        exact = exact and same_leaf(activation, computed)  # which may have been given views, and copies are tried
        ragged = self._lengths is not None and activation.ndim > 1 and activation.shape[1] == self._length
        form = RowForm.of(activation, ragged)
        lengths = self._lengths.tolist() if self._lengths is not None and ragged else None
        restored = pieces_of(form, activation, lengths).batch(form, self._length, activation.device)
        wanted = self._outputs(self._calls, Passage(length=self._length), None)
        for short, materialise in ((True, False), (False, False), (False, True)):
            self._bypass.stand_ins(short, materialise)
            problem = self._differs(self._calls, wanted, restored, None, self._length)
            if problem is None:
                break
        if problem is not None:
            return Proof(problem, True)
        absent = self._input_leaf
        without = absent is not None and self._differs(self._calls, wanted, restored, absent, self._length) is None
        proof = Proof(None, False, without, exact, sizes, ragged, self._padding_comes_out)
        return proof if self._lengths is None else self._try_shorter(proof, activation, ragged)

    def _try_shorter(self, proof: Proof, activation: Tensor, ragged: bool) -> Proof:
        """Run the shorter samples alone, padded to less."""
        if self._lengths is None or self._length is None:
            raise RuntimeError("the samples do not differ in length")
        shorter = np.unique(self._lengths[self._lengths < self._length])
        if not len(shorter) or len(self._calls) > 1:
            return dataclasses.replace(proof, again=True)
        length = int(shorter[len(shorter) // 2])
        calls = self._calls_of(length)
        found = self._boundary(calls, seed=1)
        if found is None or (ragged and found.shape[1] != length):
            return Proof("the frozen layers cannot be run for shorter samples alone", True)
        exact = proof.exact and self._is_alike(found, activation, length, ragged)
        outputs = self._outputs(calls, Passage(length=length), None)
        absent = self._input_leaf if proof.without_input else None
        problem = self._differs(calls, outputs, found, absent, length)
        if problem is not None:  # a dimension that is as long as these samples by chance?
            return dataclasses.replace(proof, problem=problem, again=True)
        for place in np.unique(np.linspace(0, len(shorter) - 1, MORE_LENGTHS).round().astype(int)):
            exact = exact and self._try_length(int(shorter[place]), activation, ragged)
        return dataclasses.replace(proof, exact=exact, padding_comes_out=self._padding_comes_out)

    def _try_length(self, length: int, activation: Tensor, ragged: bool) -> bool:
        """Whether the samples that are no longer give the same bits if they are padded to this."""
        try:
            found = self._boundary(self._calls_of(length), seed=1)
        except Exception:  # a length that the network cannot take, and never will be given
            return True
        return found is None or self._is_alike(found, activation, length, ragged)

    def _calls_of(self, length: int) -> list[NetworkCall]:
        """The call for the samples that are no longer than that."""
        rows, call = torch.from_numpy(np.flatnonzero(self._short(length))), self._calls[0]
        args, kwargs = rows_of(call.args, call.kwargs, self._samples, rows, (self._length or 0, length))
        return [NetworkCall(call.entry, args, kwargs)]

    def _short(self, length: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return np.asarray(self._lengths) <= length

    def _is_alike(self, found: Tensor, activation: Tensor, length: int, ragged: bool) -> bool:
        """Whether what shorter samples give alone has the same bits."""
        places = np.flatnonzero(self._short(length))
        wanted = activation[torch.from_numpy(places).to(activation.device)]
        exact = True
        for own, one, other in zip(np.asarray(self._lengths)[places], found, wanted, strict=True):
            one, other = (one[:own], other[:own]) if ragged else (one, other)
            if not rows_alike(one, other):
                raise _RowsDifferError("the output of the frozen layers depends on how far a sample is padded")
            exact = exact and same_leaf(one, other)
        return exact

    def _differs(
        self,
        calls: list[NetworkCall],
        wanted: list[Tensor],
        activation: Tensor,
        absent: int | None,
        length: int | None,
    ) -> str | None:
        """What goes wrong when the prefix is left out; None: nothing."""
        skip = len(self._bypass.units)
        activation = activation.clone(memory_format=torch.preserve_format)
        try:
            found = self._outputs(calls, Passage(skip=skip, activation=activation, length=length), absent)
        except Exception as error:  # the user's modules may raise anything when they are given stand-ins
            return f"without its frozen layers the network fails ({type(error).__name__}: {_first_line(error)})"
        for one, other in zip(found, wanted, strict=False):
            if same_leaf(one, other):
                continue
            kept = self._kept_positions(one)
            if kept is None or one.shape != other.shape or not same_leaf(one[kept], other[kept]):
                padding = " or looks at padding" if self._lengths is not None else ""
                return (
                    f"something behind the boundary uses what was computed in front of it (a skip connection?){padding}"
                )
            self._padding_comes_out = True
        return None if len(found) == len(wanted) else "without its frozen layers the network gives something else"

    def _kept_positions(self, output: Tensor) -> Tensor | None:
        """Which positions of ``[samples, positions, ...]`` are not padding; None: it has no such dimensions."""
        if self._lengths is None or output.ndim < 2 or tuple(output.shape[:2]) != (self._samples, self._length):
            return None
        return (torch.arange(output.shape[1]) < torch.from_numpy(self._lengths)[:, None]).to(output.device)

    def _sizes(self, activation: Tensor) -> tuple[bool, frozenset[int]]:
        """Run the batch rolled by one, then a half of it, and so on; the sizes that change no bit."""
        if any(isinstance(leaf, EarlierOutput) for leaf in _leaves(self._calls[0])):
            return True, frozenset([self._samples])
        proven = []
        size = self._samples
        while size >= 1:
            rows = torch.arange(self._samples).roll(1)[:size]
            if not self._is_exact(activation, rows):
                break
            proven.append(size)
            size //= 2
        return bool(proven), frozenset(proven)

    def _is_exact(self, activation: Tensor, rows: Tensor) -> bool:
        args, kwargs = rows_of(self._calls[0].args, self._calls[0].kwargs, self._samples, rows)
        try:
            found = self._boundary([NetworkCall(self._calls[0].entry, args, kwargs)], seed=1)
        except Exception as error:  # a network that cannot take a smaller batch may raise anything
            if len(rows) < self._samples:
                return False
            told = f"{type(error).__name__}: {_first_line(error)}"
            raise _RowsDifferError(f"the network fails on its own input ({told})") from error
        if found is None:  # the prefix needs later calls of the network too, whose arguments are not known in parts
            return len(rows) == self._samples
        wanted = activation[rows.to(activation.device)]
        if not rows_alike(found, wanted):
            raise _RowsDifferError("the output of the frozen layers for one sample depends on the others in its batch")
        return same_leaf(found, wanted)

    def _boundary(self, calls: list[NetworkCall], seed: int) -> Tensor | None:
        passage = Passage(stop=True)
        with self._random(seed):
            before, gpus = random_state(), self._gpu_states()
            with contextlib.suppress(BoundaryReachedError):
                self._run(calls, passage, None)
            self._drew |= not same_random_state(before, random_state())
            self._drew |= not all(map(torch.equal, gpus, self._gpu_states()))
        return passage.reached.clone(memory_format=torch.preserve_format) if passage.reached is not None else None

    def _outputs(self, calls: list[NetworkCall], passage: Passage, absent: int | None) -> list[Tensor]:
        with self._random(1):
            return self._run(calls, passage, absent)

    def _run(self, calls: list[NetworkCall], passage: Passage, absent: int | None) -> list[Tensor]:
        outputs: list[list[Tensor]] = []
        behind: list[Tensor] = []
        passage.samples = None
        self._bypass.begin(passage)
        for number, call in enumerate(calls):
            place = -1

            def prepare(value: Any, number: int = number) -> Any:
                nonlocal place
                if isinstance(value, EarlierOutput):
                    return outputs[value.call][value.leaf]
                place += 1
                if number == 0 and place == absent:
                    return stand_in_tensor(value.shape, value.dtype, value.device)
                return value.clone(memory_format=torch.preserve_format)

            args, kwargs = change_leaves((call.args, call.kwargs), (Tensor, EarlierOutput), prepare)
            output = self._modules[call.entry](*args, **kwargs)
            outputs.append(list(tensor_leaves(output)))
            if passage.reached is not None:  # what comes out in front of the boundary may be a stand-in
                behind.extend(outputs[-1])
        return behind

    @contextlib.contextmanager
    def _random(self, seed: int) -> Iterator[None]:
        with kept_random_state(), torch.random.fork_rng(self._gpus):
            seed_all(seed)
            torch.manual_seed(seed)
            yield

    def _gpu_states(self) -> list[Tensor]:
        return [torch.cuda.get_rng_state(device) for device in self._gpus]

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """Running statistics of normalisation move whenever an active module runs; put them back."""
        buffers = {id(b): b for module in self._modules.values() for b in module.buffers(recurse=False)}
        before = [(buffer, buffer.clone()) for buffer in buffers.values()]
        try:
            yield
        finally:
            for buffer, value in before:
                if not same_leaf(buffer.detach(), value):
                    buffer.copy_(value)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Other ranks do not run this: statistics over all of them are taken over this one."""
        replacements = ForwardReplacements()
        for module in self._modules.values():
            if isinstance(module, nn.SyncBatchNorm):
                replacements.replace(module, functools.partial(_statistics_of_this_rank, module))
        try:
            yield
        finally:
            replacements.restore()

    def _in_autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(*self._autocast)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _statistics_of_this_rank(module: nn.SyncBatchNorm, original: Forward) -> Forward:
    return functools.partial(_BatchNorm.forward, module)


class _NoTalk(TorchDispatchMode):
    """Raises where something is sent to other ranks."""

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _TalksError("the network itself exchanges tensors with other processes when it runs")
        return func(*args, **(kwargs or {}))


class _TalksError(Exception):
    """Ends a proof."""


class _RowsDifferError(Exception):
    """Ends a proof."""


class _NotCompiledError(Exception):
    """Ends a proof."""


def rows_alike(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same up to rounding."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if same_leaf(first, second):
        return True
    if not first.dtype.is_floating_point:
        return False
    allowed = ROUNDING * torch.finfo(first.dtype).eps * float(first.abs().max())
    return bool((first.float() - second.float()).abs().max() <= allowed)


def _leaves(call: NetworkCall) -> list[Any]:
    found: list[Any] = []
    change_leaves((call.args, call.kwargs), (Tensor, EarlierOutput), found.append)
    return found
