"""Entries in the progress bar of a Trainer, TQDM's or Rich's.

``LightningModule.log(..., prog_bar=True)`` was not taken: it logs numbers only, and they become metrics of the run, in
``callback_metrics`` and in the loggers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

_ENTRIES = "_egeria_entries"


class BarEntry:
    """Shows ``name=text`` in the Trainer's progress bar until `remove`.

    Args:
        trainer: owner of the progress bar; it may have none.
        name: name of the entry.
        text: called at each refresh, returns the text to show, or None to hide the entry.
    """

    def __init__(self, trainer: pl.Trainer | None, name: str, text: Callable[[], str | None]) -> None:
        self._name = name
        self._bar: Any = trainer.progress_bar_callback if trainer is not None else None
        if self._bar is None:
            return
        entries: dict[str, Callable[[], str | None]] | None = vars(self._bar).get(_ENTRIES)
        if entries is not None:
            entries[name] = text
            return
        shown = {name: text}
        original = self._bar.get_metrics

        def get_metrics(*args: Any, **kwargs: Any) -> dict[str, Any]:
            texts = {entry: say() for entry, say in shown.items()}
            return {**original(*args, **kwargs), **{entry: said for entry, said in texts.items() if said is not None}}

        vars(self._bar).update({_ENTRIES: shown, "get_metrics": get_metrics})

    def remove(self) -> None:
        """Remove the entry; the last one also restores the bar. Safe to call twice."""
        entries = vars(self._bar).get(_ENTRIES, {}) if self._bar is not None else {}
        entries.pop(self._name, None)
        if self._bar is not None and not entries:
            vars(self._bar).pop(_ENTRIES, None)
            vars(self._bar).pop("get_metrics", None)
        self._bar = None
