"""The figures of a run."""

import pytest

from lightning_egeria import RunRecorder
from lightning_egeria.methods.goodput.control import BatchSizeControl
from lightning_egeria.methods.goodput.decision import Division, LargestGoodput
from lightning_egeria.methods.goodput.display import panels_of
from lightning_egeria.methods.goodput.profile import Configuration
from lightning_egeria.report.record import RunRecord
from support.goodput import adaptive, numbered, trained


def test_figures_are_those_of_the_formulas():
    control = BatchSizeControl(8, 64, (4, None), LargestGoodput(), 10, 1)
    assert all(not any(panel.series.values()) for panel in panels_of(control, 1))
    for local in (8, 16):
        control.profile.add(Configuration(1, 1, local, 0), 0.1 + 0.01 * local, stepped=True)
    control.note(1, Division(8, 1, 1))
    control.noise.add([5.0], [3.0], 2, 2.0)  # |G|^2 = 1, tr(S) / M0 = 4
    control.note(11, Division(8, 1, 1))
    control.note(12, Division(16, 2, 1))
    size, noise, goodput, efficiency, throughput = (panel.series for panel in panels_of(control, 1))
    assert size == {"batch size": [(1, 8), (11, 8), (12, 8), (12, 32)]}
    assert noise == {"noise scale": [(11, 32.0), (12, 32.0)]}
    expected = 5 / (4 / 4 + 1) / 4
    assert efficiency["efficiency"] == [(11, 1.0), (12, pytest.approx(expected))]
    assert goodput["throughput"] == [(11, pytest.approx(8 / 0.18, rel=0.01)), (12, pytest.approx(32 / 0.52, rel=0.01))]
    assert goodput["goodput"][1][1] == pytest.approx(expected * goodput["throughput"][1][1])
    assert throughput["measured"] == [(8, pytest.approx(8 / 0.18)), (16, pytest.approx(16 / 0.26))]
    assert throughput["fitted"][0] == (8, pytest.approx(8 / 0.18, rel=0.01))
    assert throughput["fitted"][-1] == (pytest.approx(64), pytest.approx(64 / 0.74, rel=0.01))


def test_a_record_has_the_figures(tmp_path):
    data = adaptive(numbered(160), batch_sizes={10: 32}, change_every_n_steps=4)
    assert data.panels() == []
    trained(data, RunRecorder(tmp_path / "run.json"))
    panels = {panel.name: panel.series for panel in RunRecord.read(tmp_path / "run.json").panels}
    assert list(panels) == [f"goodput_{name}" for name in ("batch_size", "noise", "rate", "efficiency", "throughput")]
    assert {height for _, height in panels["goodput_batch_size"]["batch size"]} == {8, 32}
    assert [place for place, _ in panels["goodput_throughput"]["measured"]] == [4, 8, 16, 32]
