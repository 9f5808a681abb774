"""`egeria cache` on directories that real runs have left."""

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from lightning_egeria.caching.store.manifest import ENTRIES, LOCK, MANIFEST
from lightning_egeria.caching.store.store import ActivationStore
from lightning_egeria.command import main
from support import untimed
from support.caching.harness import Run
from support.caching.parts import Classifier, ConvNet, images, loader


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    run = Run(True, tmp_path_factory.mktemp("run") / "run")
    with mock.patch.multiple("lightning_egeria.caching.policy", **untimed.FREE):
        run.fit(Classifier(ConvNet()), loader(images(40), batch_size=8), schedule={1: 2})
    return run.cache_dir


@pytest.fixture
def cache_dir(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "cache")
    (tmp_path / "cache").chmod(0o700)
    return tmp_path / "cache"


def run(*arguments):
    return main(["cache", *map(str, arguments)])


def only(cache_dir):
    (folder,) = cache_dir.iterdir()
    return folder


def test_ls_says_what_is_there(cache_dir, capsys):
    assert run("ls", cache_dir) == 0
    output = capsys.readouterr().out
    assert "Classifier, 'net.a', 'net.b'" in output
    assert "TensorDataset" in output
    assert "4x6x6 torch.float32" in output
    assert "40 of 40" in output
    assert "0 min ago" in output
    assert "1 stores" in output


def test_default_directory_may_not_be_there_yet(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run("ls") == 0
    assert "0 stores" in capsys.readouterr().out
    assert run("ls", tmp_path / "other") == 2
    assert "cannot be read" in capsys.readouterr().err


def test_verify_reads_every_entry(cache_dir, capsys):
    assert run("verify", cache_dir) == 0
    assert "40 entries are sound, 0 are damaged" in capsys.readouterr().out
    os.truncate(only(cache_dir) / ENTRIES, (only(cache_dir) / ENTRIES).stat().st_size // 2)
    assert run("verify", cache_dir) == 1
    assert "20 are damaged" in capsys.readouterr().out


def test_a_damaged_manifest_is_shown_and_pruned(cache_dir, capsys):
    (only(cache_dir) / MANIFEST).write_text("{")
    assert run("ls", cache_dir) == 0
    assert "damaged" in capsys.readouterr().out
    assert run("verify", cache_dir) == 1
    assert run("prune", cache_dir) == 0
    assert not list(cache_dir.iterdir())


def test_prune_leaves_what_a_run_has_open_or_has_used_lately(cache_dir, capsys):
    store = ActivationStore(only(cache_dir))
    assert run("ls", cache_dir) == 0
    assert "now, by a run" in capsys.readouterr().out
    assert run("prune", cache_dir) == 0
    assert "kept, a run uses it" in capsys.readouterr().out
    store.close()
    assert run("prune", cache_dir, "--older-than", "1d") == 0
    assert "kept, used 0 min ago" in capsys.readouterr().out
    assert only(cache_dir).exists()
    assert run("prune", cache_dir) == 0
    assert "removed" in capsys.readouterr().out
    assert not list(cache_dir.iterdir())


@pytest.mark.parametrize("text", ["nan", "-1", "7", "0d"])
def test_prune_wants_a_period(cache_dir, capsys, text):
    with pytest.raises(SystemExit, match="2"):
        run("prune", cache_dir, f"--older-than={text}")
    assert f"--older-than: expected a period such as 30d or 12h, got '{text}'" in capsys.readouterr().err
    assert only(cache_dir).exists()


def test_ls_for_programs(cache_dir, capsys):
    assert run("ls", cache_dir, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["store"], found["entries"], found["present"]) == (only(cache_dir).name, 40, 40)
    assert found["about"]["model"] == "Classifier"
    (only(cache_dir) / MANIFEST).write_text("{")
    assert run("ls", cache_dir, "--json") == 0
    assert json.loads(capsys.readouterr().out)["about"] is None


def test_verify_and_prune_for_programs(cache_dir, capsys):
    def found(*arguments):
        status = run(*arguments, "--json")
        return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    name = only(cache_dir).name
    assert found("verify", cache_dir) == (0, [{"store": name, "sound": 40, "damaged": 0, "reason": ""}])
    status, (kept,) = found("prune", cache_dir, "--older-than", "1d")
    assert (status, kept["store"], kept["removed"], kept["reason"]) == (0, name, False, "kept, used 0 min ago")
    (only(cache_dir) / MANIFEST).write_text("{")
    status, (damaged,) = found("verify", cache_dir)
    assert (status, damaged["sound"], damaged["damaged"]) == (1, None, None)
    assert damaged["reason"]
    assert found("prune", cache_dir)[1][0]["removed"] is True


def test_prune_removes_what_a_killed_run_has_begun(cache_dir):
    begun = cache_dir / ("0123" * 8)
    begun.mkdir()
    (begun / LOCK).write_text("")
    (begun / f"{MANIFEST}.77").write_text("{")
    assert run("prune", cache_dir) == 0
    assert not list(cache_dir.iterdir())


def test_prune_leaves_the_users_own_files(cache_dir, capsys):
    (cache_dir / "notes").mkdir()
    (cache_dir / "notes" / "text").write_text("mine")
    (only(cache_dir / "notes")).write_text("mine")
    assert run("prune", cache_dir) == 0
    assert (cache_dir / "notes" / "text").read_text() == "mine"


def test_prune_leaves_the_files_of_another_program(cache_dir, capsys):
    """The folder of a web extension, say, in a cache directory that is a folder of projects."""
    names = {"manifest.json", "lock", "index", "entries", "manifest.json.orig", "main.py"}
    for folder in (cache_dir / "project", cache_dir / ("ab" * 16)):
        folder.mkdir(mode=0o700)
        for name in names:
            (folder / name).write_text("mine")
    assert run("prune", cache_dir) == 0
    assert "could not be removed: it holds files that are not the cache's" in capsys.readouterr().out
    for folder in (cache_dir / "project", cache_dir / ("ab" * 16)):
        assert {file.name for file in folder.iterdir()} == names


def test_help_without_a_home_directory(monkeypatch, capsys):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    assert run("ls") == 2
    assert "this user has no home directory. Name a cache directory" in capsys.readouterr().err


def test_mistakes_are_told_in_one_line(tmp_path, capsys):
    assert run("ls", tmp_path / "nothing") == 2
    assert "egeria cache: the cache directory" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run("ls", tmp_path / "file") == 2
    assert "it is no folder" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()
