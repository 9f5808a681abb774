"""The application, run in this process as the console script runs it."""

import itertools
import json
import os
import sys

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from lightning_egeria.train import main

SMALL = (
    "model.net.depth=8",
    "trainer=cpu",
    "trainer.max_epochs=1",
    "+trainer.limit_train_batches=4",
    "+trainer.limit_val_batches=1",
    "+trainer.enable_progress_bar=false",
    "data.batch_size=8",
)


@pytest.fixture
def egeria_train(tmp_path, monkeypatch):
    """Run `egeria-train` with overrides from an empty folder; return its run directory, a new one each time."""
    counter = itertools.count()

    def run(*overrides):
        run_dir = tmp_path / f"run{next(counter)}"
        monkeypatch.setattr(sys, "argv", ["egeria-train", *SMALL, f"hydra.run.dir={run_dir}", *overrides])
        main()
        return run_dir

    monkeypatch.chdir(tmp_path)
    # Hydra sets it for the process, and each run anew.
    monkeypatch.setitem(os.environ, "HYDRA_MAIN_MODULE", "lightning_egeria.train")
    yield run
    GlobalHydra.instance().clear()


def results(run_dir):
    return json.loads((run_dir / "savings.json").read_text())


def test_trains_and_leaves_its_figures(egeria_train, capsys):
    run_dir = egeria_train()

    found = results(run_dir)
    assert set(found) == {"savings", "cache", "metrics", "fit_time_s"}
    assert found["savings"]
    assert {"train/loss", "val/loss", "val/acc"} <= set(found["metrics"])
    assert 0 <= found["metrics"]["val/acc"] <= 1
    assert found["fit_time_s"] > 0
    assert str(run_dir / "savings.json") in capsys.readouterr().out
    assert (run_dir / "log" / "metrics.csv").is_file()


def test_trains_from_the_cache(egeria_train, tmp_path):
    policy = "{_target_: lightning_egeria.ScriptedPolicy, schedule: {2: 1}}"
    freeze = ["~callbacks.freezing.policy", f"+callbacks.freezing.policy={policy}"]
    cache = ["cache=disk", f"cache.cache_dir={tmp_path / 'cache'}", "cache.min_free_bytes=0"]
    overrides = ["trainer.max_epochs=8", "data.num_workers=0", "callbacks.freezing.workers=0"]
    run_dir = egeria_train(*freeze, *cache, *overrides)
    found = results(run_dir)["cache"]
    assert found["off"] is None
    assert found["written"] > 40
    assert found["hits"] > 0


def test_trains_without_the_callback(egeria_train):
    assert results(egeria_train("callbacks=none", "logger=none"))["savings"] is None


def test_two_runs_with_one_seed_end_in_the_same_place(egeria_train):
    first, second, other = (
        results(egeria_train("callbacks=none", "logger=none", f"seed={seed}"))["metrics"] for seed in (1, 1, 2)
    )
    assert first == second
    assert first["train/loss"] != other["train/loss"]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # a resumed run has a folder of its own
def test_resumes_from_a_checkpoint(egeria_train):
    run_dir = egeria_train("callbacks=none", "logger=none")
    (checkpoint,) = (run_dir / "checkpoints").glob("*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 4

    run_dir = egeria_train("callbacks=none", "logger=none", "trainer.max_epochs=2", f"ckpt_path='{checkpoint}'")

    (checkpoint,) = (run_dir / "checkpoints").glob("*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 8


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.net.depth=21"], ["depth must be 6n + 2", "21"]),  # raised while Hydra instantiates
        (["data=cifar10", "data.root=nowhere"], ["nowhere", "cifar-10-batches-py", "labels.npz"]),  # raised by fit
        (["callbacks.freezing.policy.tolerance=2"], ["tolerance"]),
        (["callbacks.freezing.layer_modules=[net.layer9]"], ["net.layer9"]),
    ],
)
def test_a_mistake_is_answered_in_one_message_and_exit_code_2(egeria_train, capsys, overrides, words):
    with pytest.raises(SystemExit) as exit_:
        egeria_train(*overrides)

    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (message,) = [line for line in error.splitlines() if line.startswith("egeria-train: ")]
    for word in words:
        assert word in message
