"""Reading the state of a method from a checkpoint, which may be damaged."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_egeria.core.snapshots.random_state import LoadingState
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import CheckpointError


def is_whole(value: object, least: int) -> bool:
    """Whether ``value`` is an integer of at least ``least``."""
    return isinstance(value, int) and value >= least


@contextlib.contextmanager
def checkpoint_read(topic: str = "freezing") -> Iterator[None]:
    """Turn the errors of reading a damaged state into `CheckpointError`.

    Args:
        topic: name of the state, for the message.

    Raises:
        CheckpointError: if the body raises because of a missing key, or a value of the wrong type or range.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        text = f"the {topic} state in the checkpoint is damaged: {type(error).__name__}: {error}"
        raise CheckpointError(text) from error


def check_version(state: Mapping[str, Any], expected: int, topic: str) -> None:
    """Check that this version of the package can read a state.

    Args:
        state: of a checkpoint.
        expected: its ``"version"``.
        topic: name of the state, for the message.

    Raises:
        CheckpointError: if it has another version, or none.
    """
    if state.get("version") != expected:
        raise CheckpointError(
            f"the checkpoint holds {topic} state of version {state.get('version')!r}, expected version {expected}. "
            "Leave out ckpt_path, or use the lightning_egeria that wrote it"
        )


def return_to(state: LoadingState, loaders: Iterable[Any], topic: str) -> None:
    """Let loaders draw again what they drew from a state on; warn if they hold other generators than they did.

    Args:
        state: of a checkpoint.
        loaders: of this run.
        topic: of the warning.
    """
    if not state.restore(loaders):
        warn_of_others(topic)


def warn_of_others(topic: str) -> None:
    """Warn that loaders hold other generators than at a checkpoint."""
    Notices(topic).warn(
        "the training loader, its sampler or its dataset hold other random generators than at the checkpoint, so "
        "samples may come in another order. Make them as in the run that wrote it"
    )


def count_of(value: object, least: int = 0, most: float = math.inf) -> int:
    """Return ``value`` if it is an integer from ``least`` to ``most``.

    Raises:
        ValueError: if it is not.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is not an integer from {least} to {most}")
    return value


def number_of(value: object) -> float:
    """Return ``value`` if it is a number; infinity and NaN count.

    Raises:
        ValueError: if it is not.
    """
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} is not a number")
    return float(value)  # type: ignore[arg-type]  # it is one of the two
