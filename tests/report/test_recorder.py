"""What `RunRecorder` keeps of real runs."""

import csv
import json
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import (
    Decision,
    FreezingPolicy,
    FrozenPrefixCache,
    KnowledgeGuidedFreezing,
    PrefixFreezing,
    RunRecorder,
    ScriptedPolicy,
)
from lightning_egeria.report import RunRecord
from lightning_egeria.report.drawing import figures_of
from support.models import trainer_of
from support.ranks import EXCHANGE_TIMEOUT, all_well, in_ranks


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def loader():
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(40, 8), torch.randint(2, (40,))), batch_size=8)


def fit(*callbacks, module=None, data=None, epochs=4, **arguments):
    trainer = trainer_of(*callbacks, epochs=epochs, **{"num_sanity_val_steps": 2, **arguments})
    if data is not None:
        trainer.fit(module or Module(), datamodule=data)
    else:
        trainer.fit(module or Module(), loader(), loader())
    return trainer


def freezing():
    policy = FreezingPolicy(patience=1, pretrained=True, trial=False, peer_tolerance=0.9)
    return KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=2, deterministic=True, background=False)


class Every(PrefixFreezing):
    """A method of a user: freezes one layer module more after each fourth step."""

    def choose_depth(self, step):
        depth = min(step // 4, self.freezer.chain.max_depth)
        return Decision(depth, f"step {step}") if depth != self.freezer.depth else None


def test_a_run_with_a_method_of_a_user(tmp_path):
    callback = Every()
    fit(callback, RunRecorder(tmp_path / "egeria.json"), logger=CSVLogger(tmp_path, "csv"))
    record = RunRecord.read(tmp_path)
    assert record.layer_modules == callback.layer_modules
    assert record.events == [vars(event) for event in callback.events]
    assert [(event["step"], event["depth"]) for event in record.events] == [(4, 1), (8, 2)]
    assert [times.depth for times in record.steps] == [0] * 4 + [1] * 4 + [2] * 12
    assert record.evaluations == []
    assert {"depth", "step_time", "phases"} <= set(figures_of([record]))
    (path,) = tmp_path.glob("csv/*/metrics.csv")
    rows = [row for row in csv.DictReader(path.read_text().splitlines()) if row["egeria/frozen_depth"]]
    assert [float(row["egeria/frozen_depth"]) for row in rows] == [1, 2]
    shares = [float(row["egeria/frozen_parameters"]) for row in rows]
    assert shares == pytest.approx([72 * depth / (3 * 72 + 18) for depth in (1, 2)])
    assert not [name for name in rows[0] if name.startswith("egeria/eval")]


@pytest.mark.parametrize("first", [True, False])
def test_a_run_with_freezing(tmp_path, first):
    callback, recorder = freezing(), RunRecorder(tmp_path / "egeria.json")
    fit(*([recorder, callback] if first else [callback, recorder]))
    record = RunRecord.read(tmp_path)
    assert record == recorder.record
    assert record.name == tmp_path.name
    assert record.layer_modules == callback.layer_modules
    assert record.events == [vars(event) for event in callback.events]
    assert record.events
    assert sum(times.batches for times in record.steps) == 20
    assert [times.step for times in record.steps] == list(range(1, 21))
    frozen_from = record.events[0]["step"]
    assert all((times.depth > 0) == (times.step > frozen_from) for times in record.steps)
    assert all(min(t.data, t.forward, t.backward, t.rest) > 0 and t.communication == 0 for t in record.steps)
    done = callback.savings().evaluations_done
    assert len(record.evaluations) == done
    assert all(len(point.plasticity) == len(record.layer_modules) for point in record.evaluations)
    assert [point.step for point in record.metrics] == [5, 10, 15, 20]
    assert all(set(point.values) == {"val/acc"} for point in record.metrics)
    assert record.savings == callback.savings()
    assert record.about["torch"] == torch.__version__


def test_a_plain_run_changes_in_nothing(tmp_path):
    plain, recorded = Module(), Module()
    fit(module=plain)
    fit(RunRecorder(tmp_path / "egeria.json", name="plain"), module=recorded)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), recorded.parameters(), strict=True))
    record = RunRecord.read(tmp_path)
    assert (record.name, record.layer_modules, record.savings) == ("plain", [], None)


def test_it_is_written_where_the_logger_writes(tmp_path):
    trainer = fit(RunRecorder(), logger=CSVLogger(tmp_path, name="runs", version="one"))
    assert Path(trainer.log_dir, "egeria.json").is_file()
    assert RunRecord.read(tmp_path / "runs" / "one").name == "one"


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader()


def test_the_cache_over_time(tmp_path):
    data = FrozenPrefixCache(Data(), cache_dir=tmp_path / "cache")
    recorder = RunRecorder(tmp_path / "egeria.json")
    fit(KnowledgeGuidedFreezing(ScriptedPolicy({5: 2})), recorder, data=data)
    points = RunRecord.read(tmp_path).cache
    assert [point.step for point in points] == [5, 10, 15, 20, 20]
    assert points[-1].hits > 0
    assert points[-1].bytes_on_disk > 0


class Broken(Module):
    def training_step(self, batch, batch_idx):
        if self.global_step == 7:
            raise RuntimeError("the user's own")
        return super().training_step(batch, batch_idx)


def test_what_there_is_survives_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="the user's own"):
        fit(RunRecorder(tmp_path / "egeria.json"), module=Broken())
    assert [times.step for times in RunRecord.read(tmp_path).steps] == list(range(1, 8))


class Slow(nn.Module):
    """A wide layer, whose gradient takes a while to exchange."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4000), nn.ReLU(), nn.Linear(4000, 2))

    def forward(self, x):
        return self.layers(x)


def run_ranks(folder):
    module = Module()
    module.net = Slow()
    recorder = RunRecorder(Path(folder, "egeria.json"))
    fit(recorder, module=module, devices=2, strategy=DDPStrategy(timeout=EXCHANGE_TIMEOUT))
    return len(recorder.record.steps)


def test_one_rank_writes(tmp_path):
    assert all_well(in_ranks(2, run_ranks, str(tmp_path))) == [12, 12]
    record = RunRecord.read(tmp_path)
    assert record.about["processes"] == "2"
    assert any(times.communication > 0 for times in record.steps)


def test_the_command_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "--lr", "0.1"])
    fit(RunRecorder(tmp_path / "egeria.json"), epochs=1)
    assert json.loads((tmp_path / "egeria.json").read_text())["about"]["command"] == "train.py --lr 0.1"


def test_training_goes_on_if_the_record_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    recorder = RunRecorder(tmp_path / "file" / "egeria.json")
    with pytest.warns(UserWarning, match="cannot write the record of the run to .* Training continues") as told:
        fit(recorder)
    assert len([warning for warning in told if "cannot write" in str(warning.message)]) == 1
    assert recorder.record.steps
