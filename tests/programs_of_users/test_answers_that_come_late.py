"""Programs on a machine so busy that the reference process answers late or never."""

import logging
import os
import re
import signal

import lightning as L
import pytest
import torch

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, RunRecorder
from lightning_egeria.report.comparison import why_nothing_froze
from support.user_programs import Blocks, SavesAt, run, same

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
MOVED = "From step"


@pytest.fixture(autouse=True)
def idle_core(monkeypatch):
    """As far as can be seen from this process, training leaves a core idle."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch.lightning_egeria")
    return lambda word: [record.getMessage() for record in caplog.records if word in record.getMessage()]


class Starves(L.Callback):
    """The reference process gets no time on any core."""

    def __init__(self, freezing):
        self.freezing, self.stopped = freezing, set()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        comparison = self.freezing.comparison
        worker = comparison.runner.worker if comparison is not None else None
        if worker is not None and worker.pid not in self.stopped:
            self.stopped.add(worker.pid)
            os.kill(worker.pid, signal.SIGSTOP)


class Decays(Blocks):
    """Trains with a decaying learning rate."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def starved(module, *others, policy=None, epochs=20, ckpt_path=None, **arguments):
    freezing = KnowledgeGuidedFreezing(policy, **arguments)
    starving = Starves(freezing)
    said = run(module, freezing, starving, *others, epochs=epochs, ckpt_path=ckpt_path)
    return freezing, starving, said


def test_a_run_with_default_arguments_freezes_all_the_same(lines, capsys):
    freezing, starving, said = starved(Decays(), epochs=40)
    assert len(starving.stopped) == 1
    assert freezing.frozen_depth > 0
    (line,) = lines(MOVED)
    assert line.startswith("freezing: 3 evaluations in a row had no answer from the reference process in time. From")
    assert said == []
    savings = freezing.savings()
    assert savings.evaluations_late + savings.evaluations_dropped == 3
    assert savings.evaluations_done > 3
    assert savings.why_nothing_froze is None
    assert "nothing froze" not in capsys.readouterr().out


def test_fine_tuning_by_plasticity_freezes_all_the_same(lines):
    freezing, _, _ = starved(Blocks(), policy=FreezingPolicy(pretrained=True, trial=False, peer_tolerance=0.9))
    assert freezing.frozen_depth > 0
    assert len(lines(MOVED)) == 1


def test_a_run_that_resumes_starts_no_process_again(tmp_path, lines):
    module = Decays()
    starved(module, SavesAt(tmp_path, 176), epochs=40)
    freezing, starving, _ = starved(Decays(), epochs=40, ckpt_path=tmp_path / "176.ckpt")
    assert starving.stopped == set()
    assert freezing.frozen_depth > 0
    assert len(lines(MOVED)) == 1


def test_until_it_freezes_the_run_is_the_one_without_the_callback(tmp_path):
    plain, watched = Decays(), Decays()
    run(plain, epochs=20)
    freezing, _, _ = starved(watched, policy=FreezingPolicy(tolerance=1e-12))
    assert freezing.savings().evaluations_done > 5
    assert same(plain, watched)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, r"in \d+ evaluations, no layer module stayed below the tolerance for long enough"),
        (
            {"background": True, "evaluate_every_n_steps": 4},
            r"\d+ of \d+ evaluations came late or were dropped. Leave a core idle",
        ),
    ],
)
def test_the_log_and_the_report_give_the_same_reason(tmp_path, lines, arguments, reason):
    recorder = RunRecorder(tmp_path / "egeria.json")
    policy = FreezingPolicy(tolerance=1e-12, pretrained=True, trial=False, peer_tolerance=0)
    freezing, _, said = starved(Blocks(), recorder, policy=policy, **arguments)
    (line,) = lines("nothing froze")
    told = line.removeprefix("freezing: nothing froze: ")
    assert told == freezing.savings().why_nothing_froze
    assert why_nothing_froze(recorder.record) == f"{told[:1].upper()}{told[1:]}."
    assert re.match(reason, told)
    assert ("Train longer" in told) == (not arguments)
    assert any("which you set to 4" in text for text in said) == bool(arguments)
