"""What live jobs are doing, as a table in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table

from lightning_egeria.cluster.fleet import Fleet, LiveJob


class Status:
    """Shows the jobs: a table that is updated in a terminal, else a line for each change.

    Args:
        console: where.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._shown: dict[str, str] = {}

    def show(self, fleet: Fleet) -> None:
        """Show what has changed since the last call."""
        states = {name: _state_of(job) for name, job in fleet.jobs.items()}
        if states == self._shown:
            return
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(table_of(fleet), refresh=True)
        else:
            for name, state in states.items():
                if state != self._shown.get(name):
                    self._console.print(f"{name}: {state}", soft_wrap=True)
        self._shown = states

    def close(self) -> None:
        """Leave the terminal as it was. Safe to call twice."""
        if self._live is not None:
            self._live.stop()
        self._live = None


def table_of(fleet: Fleet) -> Table:
    """Return a table with a row for each job."""
    table = Table("job", "state", "device-seconds", "restarts", "progress")
    for name, job in fleet.jobs.items():
        hints = fleet.hints(name)
        progress = "" if hints is None else f"{hints.progress:.0f} steps"
        table.add_row(name, _state_of(job), f"{job.service:.0f}", str(max(job.starts - 1, 0)), progress)
    return table


def _state_of(job: LiveJob) -> str:
    if job.state != "running":
        return job.state
    return f"running on {job.running} device{'s' * (job.running != 1)}"
