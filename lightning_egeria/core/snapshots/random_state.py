"""Saving and restoring the random number generators of this process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
# What a loader loads with; a sampler inside the one by which Lightning deals it out; a loader inside another.
_PARTS = ("_loader", "sampler", "batch_sampler", "_sampler", "dataset")


class RandomState(NamedTuple):
    """State of the generators of torch, numpy and Python.

    Two states are equal exactly when the generators would draw the same numbers next.

    Attributes:
        torch_cpu: state of torch's default CPU generator.
        torch_cuda: state of the generator of each initialised CUDA device.
        numpy: name, keys, position and cached Gaussian of numpy's global generator.
        python: state of the `random` module.
    """

    torch_cpu: bytes
    torch_cuda: tuple[bytes, ...]
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    @classmethod
    def current(cls) -> RandomState:
        """Return the current state.

        >>> before = RandomState.current()
        >>> before == RandomState.current()
        True
        >>> number = torch.rand(1)
        >>> before == RandomState.current()
        False
        """
        name, keys, *rest = np.random.get_state()  # noqa: NPY002  # the generator that user code draws from
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(
            torch.get_rng_state().numpy().tobytes(),
            tuple(state.numpy().tobytes() for state in devices),
            (name, np.asarray(keys).tobytes(), *rest),
            random.getstate(),
        )

    def to_plain(self) -> list[Any]:
        """Return the state in texts, numbers and lists of them, for a checkpoint.

        >>> state = RandomState.current()
        >>> RandomState.from_plain(state.to_plain()) == state
        True
        """
        name, keys, *rest = self.numpy
        version, numbers, gauss = self.python
        cuda = [state.hex() for state in self.torch_cuda]
        return [self.torch_cpu.hex(), cuda, [name, keys.hex(), *rest], [version, list(numbers), gauss]]

    @classmethod
    def from_plain(cls, state: Sequence[Any]) -> RandomState:
        """Return the state of `to_plain`.

        Raises:
            ValueError: it is damaged.
        """
        cpu, cuda, (name, keys, *rest), (version, numbers, gauss) = state
        return cls(
            bytes.fromhex(cpu),
            tuple(map(bytes.fromhex, cuda)),
            (name, bytes.fromhex(keys), *rest),
            (version, tuple(numbers), gauss),
        )

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(_tensor(self.torch_cpu))
        if self.torch_cuda:
            torch.cuda.set_rng_state_all([_tensor(state) for state in self.torch_cuda])
        name, keys, position, has_gauss, gauss = self.numpy
        np.random.set_state((name, np.frombuffer(keys, np.uint32), position, has_gauss, gauss))  # noqa: NPY002  # the same one
        random.setstate(self.python)


class LoadingState(NamedTuple):
    """State of all that loading draws from, at one moment. An epoch that begins there has the same batches again.

    Attributes:
        random: of the generators of this process.
        held: of the generators that loaders, their samplers and their datasets have as attributes.
    """

    random: RandomState
    held: tuple[Any, ...] = ()

    @classmethod
    def current(cls, loaders: Iterable[Any]) -> LoadingState:
        """Return the current state.

        >>> loader = torch.utils.data.DataLoader(range(9), shuffle=True, generator=torch.Generator())
        >>> begun = LoadingState.current([loader])
        >>> order = [batch.item() for batch in loader]
        >>> LoadingState.from_plain(begun.to_plain()).restore([loader])
        True
        >>> order == [batch.item() for batch in loader]
        True
        """
        return cls(RandomState.current(), tuple(_plain(state_of(one)) for one in _held_by(loaders)))

    def to_plain(self) -> list[Any]:
        """Return the state in texts, numbers, and lists and dicts of them, for a checkpoint."""
        return [self.random.to_plain(), list(self.held)]

    @classmethod
    def from_plain(cls, state: Sequence[Any]) -> LoadingState:
        """Return the state of `to_plain`.

        Raises:
            ValueError: it is damaged.
        """
        random, held = state
        return cls(RandomState.from_plain(random), tuple(held))

    def restore(self, loaders: Iterable[Any]) -> bool:
        """Set the generators to this state; return whether the loaders hold generators as those of the state did."""
        self.random.restore()
        return self.restore_held(loaders)

    def restore_held(self, loaders: Iterable[Any]) -> bool:
        """Do so with the generators that the loaders hold."""
        generators = list(_held_by(loaders))
        for generator, state in zip(generators, self.held, strict=False):
            try:
                set_state(generator, _state_in(state))
            except (TypeError, ValueError, RuntimeError):  # of another class
                return False
        return len(generators) == len(self.held)


def _held_by(owners: Iterable[Any], seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Yield the generators that loaders and their parts hold, each once."""
    seen = {} if seen is None else seen
    for one in owners:
        if id(one) in seen:
            continue
        seen[id(one)] = one
        held = getattr(one, "__dict__", {})
        for value in held.values():
            if isinstance(value, GENERATORS) and id(value) not in seen:
                seen[id(value)] = value
                yield value
        # In depth: a sampler that Lightning has put into another one keeps its place before the dataset.
        yield from _held_by((held[name] for name in _PARTS if name in held), seen)


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return {"torch": state.numpy().tobytes().hex()}
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, (list, tuple)) else state


def _state_in(plain: Any) -> Any:
    """Return what `set_state` takes."""
    if isinstance(plain, list):  # of Python
        version, numbers, gauss = plain
        return version, tuple(numbers), gauss
    return _tensor(bytes.fromhex(plain["torch"])) if "torch" in plain else plain


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random state of torch (CPU and CUDA), numpy and Python on exit.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> with preserved_random_state():
    ...     drawn = torch.rand(1)
    >>> torch.equal(drawn, torch.rand(1))
    True
    """
    state = RandomState.current()
    try:
        yield
    finally:
        state.restore()


def state_of(generator: Any) -> Any:
    """Return the state of one of `GENERATORS`, for `set_state`.

    >>> generator = random.Random(0)
    >>> before = state_of(generator)
    >>> drawn = generator.random()
    >>> set_state(generator, before)
    >>> generator.random() == drawn
    True
    """
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Return one of `GENERATORS` to a state of `state_of`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
