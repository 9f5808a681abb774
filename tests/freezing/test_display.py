"""What the user sees: metrics, log lines and the progress bar."""

import csv
import logging

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import TensorDataset

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, ScriptedPolicy, SlopePolicy
from support import models
from support.models import Classifier, loader, mlp


class Module(Classifier):
    def __init__(self):
        super().__init__(mlp())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(callback, *callbacks, epochs=8, module=None, **arguments):
    torch.manual_seed(0)
    data = loader(TensorDataset(torch.randn(40, 6), torch.arange(40) % 3))
    module = Module() if module is None else module
    return models.fit(module, callback, *callbacks, data=data, epochs=epochs, **arguments)


def guided():
    policy = SlopePolicy(tolerance=0.9, window_evaluations=2, patience=1, bootstrap=False)
    return KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=2, background=False)


def test_metrics_of_every_evaluation_reach_the_logger(tmp_path):
    callback = guided()
    fit(callback, logger=CSVLogger(tmp_path, name="", version=""))
    with (tmp_path / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    rows = {int(row["step"]): row for row in rows if "egeria/frozen_depth" in row}

    assert sorted(rows) == list(range(1, 40, 2))  # Lightning counts the steps that it logs from 0 on
    last, frozen_at = rows[39], callback.events[0].step
    assert last["egeria/frozen_depth"] == callback.frozen_depth > 0
    assert 0 < last["egeria/frozen_parameters"] < 1
    assert 0 < last["egeria/frozen_step_time"] < 1
    assert last["egeria/evaluations_done"] == callback.savings().evaluations_done
    assert {"egeria/evaluations_late", "egeria/evaluations_dropped", "egeria/reference_age"} <= set(last)
    before = rows[frozen_at - 1]
    assert {f"egeria/plasticity/net.{i}" for i in range(2 * callback.events[0].depth, 8, 2)} <= set(before)
    assert any(name.startswith("egeria/slope/net.") for row in rows.values() for name in row)
    # A frozen layer module has no plasticity: nothing is logged for it.
    assert not any(name.endswith("/net.0") for name in last)


class TwoOptimizers(Module):
    """One for the last layer, another for the rest, each with a step in every batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[:-1].parameters(), lr=0.05), torch.optim.SGD(self.net[-1].parameters(), lr=0.05)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        self.log("train/loss", loss)


def test_metrics_have_the_steps_of_lightnings_own(tmp_path):
    fit(guided(), module=TwoOptimizers(), logger=CSVLogger(tmp_path, name="", version=""), log_every_n_steps=1)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    own = {row["step"] for row in rows if row["train/loss"]}
    ours = [row["step"] for row in rows if row["egeria/frozen_depth"]]
    assert len(own) == 40
    assert len(ours) == len(set(ours)) == 40  # two optimizer steps in each batch: each is an evaluation step
    assert set(ours) == own


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_show_the_frozen_depth(bar):
    seen = {}

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen[trainer.global_step] = trainer.progress_bar_callback.get_metrics(trainer, pl_module).get("frozen")

    callback = KnowledgeGuidedFreezing(ScriptedPolicy({3: 2}))
    trainer = fit(callback, bar(), Look(), epochs=1, enable_progress_bar=True)
    assert seen == {1: "0/4", 2: "0/4", 3: "2/4", 4: "2/4", 5: "2/4"}
    assert "get_metrics" not in vars(trainer.progress_bar_callback)


def test_one_line_for_each_freeze_and_unfreeze(caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch.lightning_egeria")
    fit(KnowledgeGuidedFreezing(ScriptedPolicy({3: 2, 5: 0})))
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("lightning_egeria")]
    assert lines == [
        "step 3: froze 2 of 4 layer modules, up to 'net.2': scheduled for step 3",
        "step 5: unfroze, 0 of 4 layer modules stay frozen: scheduled for step 5",
    ]


def test_what_it_saves_is_said_once_it_was_measured(caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch.lightning_egeria")
    fit(guided())
    line = next(record.getMessage() for record in caplog.records if ": froze " in record.getMessage())
    assert "stayed below" in line
    assert line.endswith("% of a step")


def test_a_run_that_lost_its_evaluations_says_so(caplog, capsys):
    caplog.set_level(logging.INFO, logger="lightning.pytorch.lightning_egeria")

    class Loses(L.Callback):
        def on_train_end(self, trainer, pl_module):
            callback.comparison.evaluations.counts.late += 30

    callback = KnowledgeGuidedFreezing(
        FreezingPolicy(1e-12, pretrained=True, trial=False, peer_tolerance=0),
        evaluate_every_n_steps=2,
        background=False,
    )
    fit(callback, Loses())
    (line,) = [record.getMessage() for record in caplog.records if "nothing froze" in record.getMessage()]
    counts = callback.comparison.evaluations.counts
    assert counts.done == 20
    assert line.startswith("freezing: nothing froze: 30 of 50 evaluations came late or were dropped.")
    assert "20 of 50" in capsys.readouterr().out


def test_a_run_that_ends_before_its_first_evaluation_says_so(caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch.lightning_egeria")
    fit(
        KnowledgeGuidedFreezing(
            FreezingPolicy(pretrained=True, trial=False), evaluate_every_n_steps=100, background=False
        )
    )
    fit(KnowledgeGuidedFreezing(ScriptedPolicy({}), evaluate_every_n_steps=100))  # needs no evaluation
    (line,) = [record.getMessage() for record in caplog.records if "nothing froze" in record.getMessage()]
    assert line.startswith("freezing: nothing froze: the run ended before the first evaluation, after 100 steps.")
