"""Log lines and warnings for the user during training, on rank 0 only."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from rich.file_proxy import FileProxy

from lightning_egeria.upstream.terminal import above_tqdm, rich_at_rest

# A child of Lightning's logger: its lines appear where Lightning's do.
_log = logging.getLogger("lightning.pytorch.lightning_egeria")


def log_line(text: str) -> None:
    """Log one line, on rank 0 only."""
    if getattr(rank_zero_only, "rank", 0) == 0:
        with above_tqdm(), _above_live_display():
            _log.info(text)


@contextlib.contextmanager
def _above_live_display() -> Iterator[None]:
    """Print through the streams of Rich's progress bar, while it is active, what log handlers write.

    The handlers keep the original streams, and the bar draws over lines that bypass its own.
    """
    proxies = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, FileProxy)]
    logger: logging.Logger | None = _log if proxies else None
    moved: list[tuple[logging.StreamHandler[Any], FileProxy, io.StringIO]] = []
    while logger is not None:
        for handler in logger.handlers:
            for proxy in proxies:
                if isinstance(handler, logging.StreamHandler) and handler.stream is proxy.rich_proxied_file:
                    moved.append((handler, proxy, io.StringIO()))
                    handler.setStream(moved[-1][-1])
        logger = logger.parent if logger.propagate else None
    try:
        yield
    finally:
        for handler, proxy, written in moved:
            handler.setStream(proxy.rich_proxied_file)
            with rich_at_rest():
                proxy.write(written.getvalue())


class Notices:
    """Log lines and warnings about one topic.

    Args:
        topic: first word of each message.

    >>> Notices("freezing").inform("3 layer modules froze")
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._told: set[str] = set()

    def inform(self, text: str, once: str | None = None) -> None:
        """Log one line; about one thing only ``once``, if that has a name."""
        if once is None or once not in self._told:
            log_line(f"{self._topic}: {text}")
        self._told.add(once or text)

    def warn(self, text: str, once: str | None = None) -> None:
        """Warn about something that the user may want to change. Training continues.

        Args:
            text: what happened, what was expected, what to do.
            once: name of the problem, to warn about it only once; None warns each time.
        """
        if once is not None and once in self._told:
            return
        self._told.add(once or text)
        rank_zero_warn(f"{self._topic}: {text}", stacklevel=5)
