import os
import time

from described import described, submitted

from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.jobfolders import State, Status
from lightning_egeria.jobs.listing import table


def test_a_line_for_each_job(tmp_path):
    home = Home(tmp_path / "home")
    with home.history() as history:
        first, second = (submitted(home, described(tmp_path), history, after)[0] for after in ((), (1,)))
        home.folder(first).write_status(Status(State.RUNNING, 2, started=time.time() - 125))
        home.folder(first).beat()
        os.utime(home.folder(first).path / "heartbeat", (1, time.time() - 90))
        lines = table(history.unfinished(), home)
    assert lines[0].split() == ["ID", "NAME", "STATE", "WHERE", "ATTEMPT", "FOR", "NOTE"]
    assert lines[1].startswith("1   hello  running  local  2        2m 5s")
    assert "no heart-beat for 1m 30s" in lines[1]
    assert lines[2].endswith(f"after {first}")
    assert second == 2
