"""Comparing the runs of a multirun at its end."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lightning_egeria.errors import RecordError


class Comparison(Callback):
    """Prints a table of the runs of a multirun, and draws a report if matplotlib is installed."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Compare the records of the jobs."""
        # Not above: each press of the tab key imports this file.
        from rich.console import Console

        from lightning_egeria.report.command import write_report
        from lightning_egeria.report.comparison import summary_table
        from lightning_egeria.report.naming import with_short_names
        from lightning_egeria.report.record import FILE_NAME, RunRecord

        folder = Path(config.hydra.sweep.dir)
        paths = sorted(folder.rglob(FILE_NAME), key=lambda path: (len(path.parent.name), path.parent.name))
        if len(paths) < 2:
            return
        try:
            records = with_short_names([RunRecord.read(path) for path in paths], paths)
            Console().print(summary_table(records))
            with contextlib.suppress(ModuleNotFoundError):  # matplotlib comes with an extra
                write_report(records, folder / "report")
                print(f"report in {folder / 'report' / 'report.html'}")
        except (RecordError, OSError) as error:
            print(f"cannot compare the runs in {folder}: {error}")
