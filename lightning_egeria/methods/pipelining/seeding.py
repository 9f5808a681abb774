"""Random numbers of a stage, the same wherever and however often it computes something."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Draw random numbers by a key in the body, and restore the random state after it."""
    before = [(generator, generator.get_state()) for generator in generators()]
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    for generator, _ in before:  # torch.manual_seed keeps a stack trace for each back end that is not in use
        generator.manual_seed(int.from_bytes(digest, "little"))
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def generators() -> list[torch.Generator]:
    """Return those that operations draw from: of the CPU, and of the current GPU if one is in use."""
    own = [torch.cuda.default_generators[torch.cuda.current_device()]] if torch.cuda.is_initialized() else []
    return [torch.default_generator, *own]
