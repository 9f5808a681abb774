"""Several runs at one go: what they share, and how they are compared."""

import pytest

from support.cli import SCRIPTED, SMALL, results


def test_a_multirun_shares_one_cache(egeria_train, tmp_path):
    cache = ["cache=disk", f"cache.cache_dir={tmp_path / 'cache'}", "cache.min_free_bytes=0"]
    options = ["trainer.max_epochs=8", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    egeria_train("seed=1,1,2", *SCRIPTED, *cache, *options, flags=["-m"])

    first, again, other = (results(tmp_path / "sweep" / str(job))["cache"] for job in range(3))
    assert first["off"] is again["off"] is other["off"] is None
    # Trained to the same weights, the second finds what the first has left; the third must not.
    assert again["hits"] > first["hits"]
    assert (again["wrong"], other["wrong"]) == (0, 0)
    assert other["written"] > 40
    # Two models, each with a store for training and one for validation.
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 4


def test_a_multirun_over_groups(egeria_train, tmp_path):
    egeria_train("callbacks=none,freezing", "logger=none", f"hydra.sweep.dir={tmp_path / 'sweep'}", flags=["-m"])
    assert [bool(results(tmp_path / "sweep" / job)["savings"]) for job in "01"] == [False, True]


def test_a_multirun_ends_with_a_comparison(egeria_train, tmp_path, capsys):
    egeria_train("callbacks=none", "logger=none", "seed=1,2", "run_dir=sweep", flags=["-m"])
    head, _, *rows, drawn = capsys.readouterr().out.splitlines()[-5:]
    assert head.split()[:2] == ["run", "frozen"]
    assert "val/acc" in head
    assert [row.split()[:2] for row in rows] == [["seed=1", "-"], ["seed=2", "-"]]
    assert drawn == "report in sweep/report/report.html"
    assert "seed=2" in (tmp_path / "sweep" / "report" / "report.html").read_text()
    # All in the one folder that was asked for.
    assert not (tmp_path / "runs").exists()
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == {"0", "1", "multirun.yaml", "report"}


def test_a_multirun_compares_what_all_runs_have_logged(egeria_train, capsys):
    small = [override for override in SMALL if "limit_val" not in override]
    options = ["callbacks=none", "logger=none", "+trainer.limit_val_batches=0,1", "run_dir=sweep"]
    egeria_train(*options, flags=["-m"], small=small)
    assert "train/loss" in capsys.readouterr().out.splitlines()[-5]


def test_several_processes_are_refused_in_a_multirun(egeria_train, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        egeria_train("trainer=ddp", "seed=1", f"hydra.sweep.dir={tmp_path / 'sweep'}", flags=["-m"])
    assert exit_.value.code == 2
    assert "a multirun cannot have jobs of several processes" in capsys.readouterr().err
