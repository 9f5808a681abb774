"""Both classes are configured by LightningCLI: from YAML, from the command line, and from the file of a run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import FreezingPolicy, FrozenPrefixCache, KnowledgeGuidedFreezing, SelectiveBackprop
from lightning_egeria.core.training.wrapping import WrappingDataModule


class Network(L.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    """Random numbers.

    Args:
        batch_size: samples of one batch.
    """

    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=self.batch_size)


CALLBACK = {
    "class_path": "lightning_egeria.KnowledgeGuidedFreezing",
    "init_args": {
        "background": False,
        "policy": {"class_path": "lightning_egeria.ScriptedPolicy", "init_args": {"schedule": {2: 1}}},
    },
}


@pytest.fixture(autouse=True)
def _as_a_program_of_its_own(monkeypatch):
    monkeypatch.setattr("sys.argv", ["app.py"])
    # Lightning 2.6 calls jsonargparse in ways that this calls deprecated.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture
def configuration(tmp_path):
    """The YAML file of a user, and where its run leaves what it was configured with."""
    path = tmp_path / "config.yaml"
    trainer = {
        "accelerator": "cpu",
        "max_epochs": 3,
        "default_root_dir": str(tmp_path / "run"),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [CALLBACK],
    }
    data = {
        "class_path": "lightning_egeria.FrozenPrefixCache",
        "init_args": {
            "cache_dir": str(tmp_path / "cache"),
            "min_free_bytes": 0,
            "datamodule": {"class_path": f"{__name__}.Data", "init_args": {"batch_size": 2}},
        },
    }
    path.write_text(yaml.safe_dump({"trainer": trainer, "data": data}))
    return path


def run(*arguments):
    return LightningCLI(Network, args=["fit", *map(str, arguments)], save_config_kwargs={"overwrite": True})


def freezing_of(cli):
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, KnowledgeGuidedFreezing))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_run_is_repeated_from_the_file_it_leaves(configuration, tmp_path):
    first = run("--config", configuration)
    assert isinstance(first.datamodule, FrozenPrefixCache)
    assert isinstance(first.datamodule.datamodule, Data)
    assert first.datamodule.datamodule.batch_size == 2
    assert [(event.step, event.depth) for event in freezing_of(first).events] == [(2, 1)]
    assert first.datamodule.stats.off is None
    assert first.datamodule.stats.written == 16

    (saved,) = (tmp_path / "run").glob("**/config.yaml")
    before = saved.read_text()
    again = run("--config", saved)
    assert saved.read_text() == before
    assert freezing_of(again).events == freezing_of(first).events
    assert again.datamodule.stats.hits > first.datamodule.stats.hits  # the same weights, so the same entries


def test_from_the_command_line():
    arguments = [
        *[
            "--trainer.callbacks",
            "KnowledgeGuidedFreezing",
            "--trainer.callbacks.policy",
            "lightning_egeria.FreezingPolicy",
        ],
        *["--trainer.callbacks.policy.tolerance", "0.1", "--trainer.callbacks.freeze_until", "net.2"],
        *["--data", "FrozenPrefixCache", "--data.datamodule", f"{__name__}.Data"],
        *["--data.datamodule.batch_size", "8", "--data.augmentation_views", "2"],
    ]
    cli = LightningCLI(
        Network, args=["--trainer.accelerator", "cpu", "--trainer.logger", "false", *arguments], run=False
    )
    policy = freezing_of(cli).policy
    assert isinstance(policy, FreezingPolicy)
    assert policy.tolerance == 0.1
    assert freezing_of(cli).freeze_until == "net.2"
    assert cli.datamodule.augmentation_views == 2
    assert cli.datamodule.datamodule.batch_size == 8


def squares(module: L.LightningModule, batch: Any) -> torch.Tensor:
    return module.net(batch[0]).square().mean(1)


@pytest.mark.filterwarnings("ignore:.*the cache of the frozen layers is off", "ignore:.*does not have many workers")
def test_wrappers_in_one_another_from_the_command_line(tmp_path):
    cli = run(
        *["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.max_epochs", "2"],
        *["--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", tmp_path],
        *["--data", "SelectiveBackprop", "--data.beta", "2", "--data.mode", "in_batch"],
        *["--data.per_sample_loss", f"{__name__}.squares"],
        *["--data.datamodule", "FrozenPrefixCache", "--data.datamodule.datamodule", f"{__name__}.Data"],
        *["--data.datamodule.datamodule.batch_size", "8"],
    )
    assert isinstance(cli.datamodule, SelectiveBackprop)
    assert isinstance(cli.datamodule.datamodule, FrozenPrefixCache)
    assert cli.datamodule.datamodule.datamodule.batch_size == 8
    assert cli.datamodule.share == 1 / 3
    assert 0 < cli.datamodule.selection.trained < cli.datamodule.selection.seen


def said(capsys, monkeypatch, *arguments):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_:
        LightningCLI(Network, args=["fit", *arguments])
    output = capsys.readouterr()
    return exit_.value.code, " ".join((output.out + output.err).split())


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        (
            "--trainer.callbacks",
            "KnowledgeGuidedFreezing",
            ["Freezes the front of a model", "train with a strategy that is refused otherwise, with a warning."],
        ),
        (
            "--data",
            "FrozenPrefixCache",
            ["Trains from cached outputs of frozen modules", "space to leave free on that disk."],
        ),
    ],
)
def test_the_help_has_the_docstrings(capsys, monkeypatch, option, name, words):
    _, listed = said(capsys, monkeypatch, "--help")
    assert f"lightning_egeria.{name}" in listed
    _, text = said(capsys, monkeypatch, f"{option}.help", name)
    for word in words:
        assert word in text


@pytest.mark.slow
def test_short_names_are_known_after_the_import_of_the_package(tmp_path):
    program = """
from contextlib import suppress
from lightning.pytorch.cli import LightningCLI
import lightning as L, lightning_egeria
for option in ("--trainer.callbacks.help=KnowledgeGuidedFreezing", "--data.help=FrozenPrefixCache"):
    with suppress(SystemExit):
        LightningCLI(L.LightningModule, subclass_mode_model=True, args=["fit", option])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "lightning_egeria.KnowledgeGuidedFreezing" in done.stdout, done.stderr
    assert "evaluate_every_n_steps" in done.stdout
    assert "lightning_egeria.FrozenPrefixCache" in done.stdout, done.stderr
    assert "cache_dir" in done.stdout


class DataWithHyperparameters(L.LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=self.hparams.batch_size)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_data_module_reads_its_hyperparameters_under_the_cache(configuration):
    content = yaml.safe_load(configuration.read_text())
    content["data"]["init_args"]["datamodule"]["class_path"] = f"{__name__}.DataWithHyperparameters"
    configuration.write_text(yaml.safe_dump(content))
    cli = run("--config", configuration)
    assert dict(cli.datamodule.datamodule.hparams) == {"batch_size": 2}
    assert cli.trainer.global_step == 3 * 8


class Around(WrappingDataModule):
    def __init__(self, datamodule: L.LightningDataModule, beta: float = 1):
        super().__init__()
        self.beta = beta
        self.wrap(datamodule)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_hyperparameters_under_two_wrappers(configuration):
    content = yaml.safe_load(configuration.read_text())
    content["data"]["init_args"]["datamodule"]["class_path"] = f"{__name__}.DataWithHyperparameters"
    content["data"] = {"class_path": f"{__name__}.Around", "init_args": {"datamodule": content["data"], "beta": 2}}
    configuration.write_text(yaml.safe_dump(content))
    cli = run("--config", configuration)
    assert (cli.datamodule.beta, cli.datamodule.augmentation_views) == (2, 0)
    assert dict(cli.datamodule.datamodule.datamodule.hparams) == dict(cli.datamodule.hparams) == {"batch_size": 2}


def test_a_mistake_in_the_inner_data_module_is_named(capsys, monkeypatch):
    data = {"class_path": "FrozenPrefixCache", "init_args": {"datamodule": {"class_path": "Dataa"}}}
    code, text = said(capsys, monkeypatch, "--data", json.dumps(data))
    assert code == 2
    assert "Dataa" in text


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_readme_shows_a_configuration_that_can_be_read(tmp_path):
    readme = (Path(__file__).parents[2] / "docs" / "egeria-train.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", readme, flags=re.DOTALL)
    path = tmp_path / "config.yaml"
    path.write_text(block.replace("my_project.MyData", f"{__name__}.Data"))
    cli = LightningCLI(Network, args=["--config", str(path), "--trainer.logger=false"], run=False)
    assert freezing_of(cli).policy.pretrained is True
    assert freezing_of(cli).policy.tolerance == FreezingPolicy().tolerance
    assert cli.datamodule.datamodule.batch_size == 64
