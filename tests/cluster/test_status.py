"""What is shown of live jobs."""

import io

from rich.console import Console

from lightning_egeria.cluster.fair import FairShare
from lightning_egeria.cluster.fleet import Fleet
from lightning_egeria.cluster.goodput import BatchLimits
from lightning_egeria.cluster.hints import Hints
from lightning_egeria.cluster.job_files import JobDescription
from lightning_egeria.cluster.jobs import Cluster
from lightning_egeria.cluster.status import Status, table_of


def fleet_in(folder):
    jobs = [JobDescription(["true"], most_devices=2, name=name) for name in ("first", "second")]
    return Fleet(jobs, Cluster((2,)), FairShare(), folder, 60.0, lambda: 0.0)


def test_each_change_is_one_line(tmp_path):
    fleet, shown = fleet_in(tmp_path), io.StringIO()
    status = Status(Console(file=shown))
    status.show(fleet)
    status.show(fleet)
    fleet.started("first", 1)
    status.show(fleet)
    fleet.started("first", 2)
    fleet.stopped("second", "failed")
    status.show(fleet)
    status.close()
    assert shown.getvalue().splitlines() == [
        "first: waiting",
        "second: waiting",
        "first: running on 1 device",
        "first: running on 2 devices",
        "second: failed",
    ]


def test_a_terminal_has_a_table_that_goes_again(tmp_path):
    fleet, shown = fleet_in(tmp_path), io.StringIO()
    status = Status(Console(file=shown, force_terminal=True, width=80))
    status.show(fleet)
    assert "waiting" in shown.getvalue()
    status.close()
    status.close()
    assert shown.getvalue().endswith("\x1b[2K")  # the last line of the table is erased


def test_the_table_has_what_jobs_say(tmp_path):
    fleet, shown = fleet_in(tmp_path), io.StringIO()
    (tmp_path / "first").mkdir()
    Hints(BatchLimits(32, 64, 8, 64), 1, 1234.4).write(tmp_path / "first" / "hints.json")
    fleet.started("first", 2)
    fleet.ran("first", 3.0)
    fleet.started("first", 1)
    Console(file=shown, width=80).print(table_of(fleet))
    (row,) = (line for line in shown.getvalue().splitlines() if "first" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["first", "running on 1 device", "6", "1", "1234 steps"]
