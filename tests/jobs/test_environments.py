import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from lightning_egeria.errors import CompilationError, ExecutionError
from lightning_egeria.jobs import environments
from lightning_egeria.jobs.environments import environment_name, evict, lock_of, python_of, requirements_in


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
        "x==1/../evil-1.0-py3-none-any.whl",
        "x==1/../evil",
        "x>=1,<2/../evil-1.0.zip",
        "x<evil.whl",
        "evil-1.0-py3-none-any.whl",
        "evil-1.0.tar.gz",
        "evil.zip",
        "evil.WHL",
        "evil.whl[extra]",
        "evil.whl ; python_version > '3'",
        "pyproject.toml",
        "x[a/../b]",
        "x==1 --hash=sha256:0",
        "x==1 -r other",
        "x ==1\x0b../evil.whl",
        "x==\u0661",
        "x\\",
    ],
)
@pytest.mark.parametrize("pinned", [False, True])
def test_only_plain_requirements(line, pinned):
    with pytest.raises(CompilationError, match=r"line \d: expected (a name and maybe versions|name==version)"):
        requirements_in(f"# first\n{line}", pinned=pinned)


@pytest.mark.parametrize(
    "line",
    ["x", "x.y>=1", "x (>=1,<2)", "x[a,b]~=1.4.2", "x!=1.*", "x===1+local", "x>1 ; sys_platform == 'linux'", "X_y<2"],
)
def test_what_a_requirement_may_be(line):
    assert requirements_in(line, pinned=False) == [line]


@pytest.fixture
def pip_only(monkeypatch):
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def test_no_source_package_runs_at_compile_time(tmp_path, monkeypatch, pip_only):
    """Neither one of an index nor one beside the description."""
    source = tmp_path / "evil-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    shutil.make_archive(str(tmp_path / "evil-1.0"), "gztar", tmp_path, "evil-1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompilationError, match="the requirements cannot be resolved"):
        lock_of(["evil"], tmp_path / "locks")
    with pytest.raises(ExecutionError, match="ended with status 1"):
        python_of("evil==1.0\n", tmp_path / "environments", lambda line: None)
    assert not (tmp_path / "ran").exists()


def test_no_module_of_the_working_folder_runs(tmp_path, monkeypatch, pip_only):
    for name in ("pip", "venv"):
        (tmp_path / name).mkdir()
        for file in ("__init__.py", "__main__.py"):
            (tmp_path / name / file).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    (tmp_path / "optparse.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompilationError):
        lock_of(["no-such-package"], tmp_path / "locks")
    python_of("", tmp_path / "environments", lambda line: None)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("umask", [pytest.param(0o002, marks=pytest.mark.slow), 0o000])
def test_folders_are_private_whatever_the_umask(umask, tmp_path, pip_only):
    before = os.umask(umask)
    try:
        python = python_of("", tmp_path / "a" / "environments", lambda line: None)
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "environments", python.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("plant", ["writable", "foreign environment", "foreign python", "other lock", "link"])
def test_a_planted_environment_does_not_run(plant, tmp_path, monkeypatch):
    """Its name is a digest that anyone can compute."""
    folder = tmp_path / "environments"
    place = folder / environment_name("x==1\n")
    (place / "bin").mkdir(parents=True)
    for part in (folder, place):
        part.chmod(0o700)
    (place / "bin" / "python").write_text("#!/bin/sh\n")
    (place / "ready").write_text("y==1\n" if plant == "other lock" else "x==1\n")
    if plant == "writable":
        folder.chmod(0o775)
    elif plant == "link":
        place.rename(tmp_path / "moved")
        place.symlink_to(tmp_path / "moved")
    elif plant.startswith("foreign"):
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(place if "environment" in plant else place / "bin" / "python", 12345, 12345)
    with pytest.raises(ExecutionError, match=r"^environment: .*Remove"):
        python_of("x==1\n", folder, lambda line: None)
    if plant in ("writable", "foreign environment"):
        with pytest.raises(ExecutionError, match="belongs to another user, or others may write to it"):
            python_of("x==1\n", folder, lambda line: None)


def test_a_planted_lock_is_not_read(tmp_path):
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks").chmod(0o775)
    with pytest.raises(CompilationError, match="others may write to it"):
        lock_of(["x"], tmp_path / "locks")


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
