import subprocess

import pytest

from lightning_egeria.errors import CompilationError
from lightning_egeria.workflow import provenance
from lightning_egeria.workflow.provenance import installed_distributions, provenance_of


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout


def test_the_commit_and_what_is_not_committed(tmp_path, monkeypatch):
    assert provenance_of(tmp_path).content()["commit"] is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1\n")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "x")
    found = provenance_of(tmp_path)
    assert (found.commit, found.changes) == (git(tmp_path, "rev-parse", "HEAD").strip(), "")
    (tmp_path / "a").write_bytes(b"2\n\xff\n")
    assert "-1" in provenance_of(tmp_path).changes
    monkeypatch.setattr(provenance, "LARGEST_DIFF", 3)
    with pytest.raises(CompilationError, match=r"larger than 3 bytes\. Commit them"):
        provenance_of(tmp_path)


def test_a_repository_runs_no_program(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.x").write_text("1\n")
    git(tmp_path, "add", "a.x")
    git(tmp_path, "commit", "-qm", "x")
    for key in ("core.fsmonitor", "diff.external", "diff.evil.textconv", "diff.evil.command"):
        git(tmp_path, "config", key, f"touch {tmp_path}/ran; true")
    (tmp_path / ".gitattributes").write_text("*.x diff=evil\n")
    (tmp_path / "a.x").write_text("2\n")
    assert "+2" in provenance_of(tmp_path).changes
    assert not (tmp_path / "ran").exists()


def test_the_environment_as_a_list():
    lines = installed_distributions().splitlines()
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0])
    assert any(line.startswith("torch==") for line in lines)
