"""The loops of Lightning, seen from what they call."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource

_FRAMES = 18  # from a loop to the iterator of a loader


def is_asked_by_loop() -> bool:
    """Whether a loop of Lightning asks for a loader or its iterator, and not a callback or the user's code."""
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if isinstance(frame.f_locals.get("self"), (_DataFetcher, _DataLoaderSource)):
            return True
        frame = frame.f_back
    return False
