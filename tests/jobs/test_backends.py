import pytest

from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.backends import NAMES, Queued, backend
from lightning_egeria.jobs.home import Home
from support.jobs.described import described


def test_the_local_one_knows_its_devices(tmp_path, monkeypatch):
    home = Home(tmp_path / "home")
    monkeypatch.setenv("EGERIA_DEVICES", "2")
    with home.history() as history:
        for devices, nodes, fits in ((2, 1, True), (3, 1, False), (1, 2, False)):
            keys = {"resources.devices": devices, "resources.nodes": nodes}
            (compiled,) = home.compiler(history).compile(described(tmp_path, **keys))
            if fits:
                Queued(home).check(compiled)
            else:
                with pytest.raises(QueueError, match="Use -b slurm"):
                    Queued(home).check(compiled)


def test_by_name(tmp_path):
    home = Home(tmp_path)
    local = backend("local", home)
    assert (local.name, local.address, local.queued, local.lost([])) == ("local", "", True, set())
    assert NAMES == ("local", "slurm", "ray")


def test_a_policy_that_changes_the_number_of_devices_wants_to_know_the_most(home, history, monkeypatch, tmp_path):
    monkeypatch.setenv("EGERIA_DEVICES", "4")
    home.follow("fair")
    more = {"resources.devices": 2, "resources.most_devices": 3}
    for keys, fits in (({}, True), ({"resources.devices": 2}, False), (more, True)):
        (compiled,) = home.compiler(history).compile(described(tmp_path, **keys))
        if fits:
            Queued(home).check(compiled)
        else:
            with pytest.raises(QueueError, match=r"under fair the number of devices .* Set resources\.most_devices"):
                Queued(home).check(compiled)
