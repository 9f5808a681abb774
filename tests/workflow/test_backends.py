import pytest
from described import described

from lightning_egeria.errors import QueueError
from lightning_egeria.workflow.backends import NAMES, Local, backend
from lightning_egeria.workflow.home import Home


def test_the_local_one_knows_its_devices(tmp_path, monkeypatch):
    home = Home(tmp_path / "home")
    monkeypatch.setenv("EGERIA_DEVICES", "2")
    with home.history() as history:
        for devices, nodes, fits in ((2, 1, True), (3, 1, False), (1, 2, False)):
            keys = {"resources.devices": devices, "resources.nodes": nodes}
            (compiled,) = home.compiler(history).compile(described(tmp_path, **keys))
            if fits:
                Local(home).check(compiled)
            else:
                with pytest.raises(QueueError, match="Use -b slurm, or set EGERIA_DEVICES"):
                    Local(home).check(compiled)


def test_by_name(tmp_path):
    home = Home(tmp_path)
    local = backend("local", home)
    assert (local.name, local.waits, local.lost([])) == ("local", True, set())
    assert NAMES == ("local", "slurm", "ray")
