import os
import subprocess
import sys
import zipfile

import pytest

from lightning_egeria.errors import CompilationError, ExecutionError
from lightning_egeria.workflow import environments
from lightning_egeria.workflow.environments import environment_name, evict, lock_of, python_of, requirements_in


@pytest.mark.parametrize(
    "line",
    [
        "-r other.txt",
        "--extra-index-url http://u:p@x",
        "-e .",
        "git+https://x/y",
        "x @ http://y",
        "../x.whl",
        "a;b;$(x)",
    ],
)
def test_only_plain_requirements(line):
    if line.startswith("a;"):
        assert requirements_in(line, pinned=False) == [line]  # a marker, which pip refuses
        return
    with pytest.raises(CompilationError, match="line 2: expected a name and maybe versions"):
        requirements_in(f"# first\n{line}", pinned=False)


def test_a_lock_has_exact_versions():
    assert requirements_in("b==1\na[x]==2.0 ; python_version > '3'", pinned=True) == [
        "a[x]==2.0 ; python_version > '3'",
        "b==1",
    ]
    for line in ("a", "a>=1", "a==1.*", "a~=1"):
        with pytest.raises(CompilationError, match="expected name==version"):
            requirements_in(line, pinned=True)


def test_names_tell_locks_apart():
    assert environment_name("a==1\n") == environment_name("a==1\n") != environment_name("a==2\n")


def test_an_environment_is_made_once_and_evicted_by_age(tmp_path):
    told = []
    python = python_of("", tmp_path, told.append)
    assert subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert len(told) == 2
    python_of("", tmp_path, told.append)
    assert len(told) == 2
    assert evict(tmp_path, 3600) == []
    os.utime(python.parent.parent / "ready", (1, 1))
    assert evict(tmp_path, 3600, keep=[environment_name("")]) == []
    assert evict(tmp_path, 3600) == [environment_name("")]
    assert not python.exists()


def test_one_that_cannot_be_made_says_why(tmp_path, monkeypatch):
    failing = [[sys.executable, "-c", "print('no such package'); raise SystemExit(1)"]]
    monkeypatch.setattr(environments, "_making", lambda place, python, lock: failing)
    told = []
    with pytest.raises(ExecutionError, match=r"environment: .* ended with status 1: no such package"):
        python_of("x==1\n", tmp_path, told.append)
    assert "no such package" in told
    monkeypatch.setattr(environments, "_making", lambda place, python, lock: [["/no/such/program"]])
    with pytest.raises(ExecutionError, match=r"environment: cannot run /no/such/program"):
        python_of("x==1\n", tmp_path, told.append)


def test_a_lock_is_resolved_once(tmp_path, monkeypatch):
    """From a folder of packages, without an index."""
    with zipfile.ZipFile(tmp_path / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "x = 1")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)  # pip, not uv
    assert lock_of(["tiny"], tmp_path / "locks") == "tiny==1.0\n"
    (tmp_path / "tiny-1.0-py3-none-any.whl").unlink()
    assert lock_of(["tiny"], tmp_path / "locks") == "tiny==1.0\n"
    assert lock_of([], tmp_path / "locks") == ""
    with pytest.raises(CompilationError, match="the requirements cannot be resolved"):
        lock_of(["tiny>=2"], tmp_path / "locks")
