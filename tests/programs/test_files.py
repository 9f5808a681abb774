import os
import stat
import subprocess
import sys
import time
import tracemalloc

import pytest

from lightning_egeria.core.programs import files
from lightning_egeria.core.programs.files import held, parsed_json, read_at_most, write_once, write_whole

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def test_what_is_no_small_ordinary_file_is_refused(tmp_path):
    path, pipe = tmp_path / "file", tmp_path / "pipe"
    path.write_bytes(b"12345")
    assert read_at_most(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_at_most(path, 4)
    os.mkfifo(pipe)
    for odd in (pipe, "/dev/zero", tmp_path):
        with pytest.raises(OSError, match=r"no ordinary file|Is a directory"):
            read_at_most(odd, 10)
    with pytest.raises(FileNotFoundError):
        read_at_most(tmp_path / "missing", 10)


def test_a_sparse_file_takes_no_memory(tmp_path):
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 2**40)
    tracemalloc.start()
    with pytest.raises(OSError, match="larger than"):
        read_at_most(path, 2**20)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


WRITERS = {
    "write_whole": lambda path: write_whole(path, "new"),
    "adding": lambda path: files.adding(path).close(),
    "touch": files.touch,
    "make_own": files.make_own,
    "held": lambda path: held(path).__enter__(),
    "copy": lambda path: files.copy(path.with_name("source"), path),
    "write_once": lambda path: write_once(path, "new"),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "device"])
def test_nothing_is_written_elsewhere(writer, kind, tmp_path):
    target, path = tmp_path / "target", tmp_path / "path"
    (tmp_path / "source").write_text("source")
    target.write_text("mine")
    os.utime(target, (1, 1))
    if kind == "link":
        path.symlink_to(target)
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "made")
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "pipe":
        os.mkfifo(path)
    elif writer in ("adding", "touch", "held", "make_own"):
        pytest.skip("one file with two names: who made them could write to it already")
    else:
        os.link(target, path)
    began = time.monotonic()
    try:
        WRITERS[writer](path)
    except OSError:
        assert writer != "write_whole"
    assert time.monotonic() - began < 2
    assert (target.read_text(), target.stat().st_mtime) == ("mine", 1)
    assert not (tmp_path / "made").exists()


@ROOT
@pytest.mark.parametrize("writer", ["adding", "touch", "held", "make_own"])
def test_a_file_of_another_user_is_not_written(writer, tmp_path):
    path = tmp_path / "path"
    path.write_text("theirs")
    path.chmod(0o666)
    os.chown(path, 12345, 12345)
    with pytest.raises(OSError, match="belongs to another user"):
        WRITERS[writer](path)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_modes_of_new_files(umask, tmp_path):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "public", "x")
        write_whole(tmp_path / "private", "x", files.PRIVATE)
        write_once(tmp_path / "once", "x")
        files.adding(tmp_path / "adding").close()
        files.touch(tmp_path / "touch")
        files.copy(tmp_path / "public", tmp_path / "copy")
        with held(tmp_path / "held"):
            pass
        files.make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes.pop("public") == 0o666 & ~umask
    assert modes.pop("a") == 0o700
    assert set(modes.values()) == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a").rglob("*")} == {0o700}


def test_the_old_file_or_the_new_one_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "old")

    def full(file, mode):
        os.close(file)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", full)
        for write in (write_whole, write_once):
            with pytest.raises(OSError, match="No space left"):
                write(path, "new")
    assert (path.read_text(), [*tmp_path.iterdir()]) == ("old", [path])
    write_once(path, "new")
    assert (path.read_text(), [*tmp_path.iterdir()]) == ("old", [path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"a":' * 100_000, "nested too deep"),
        ("1" * 20, "an integer of 20 digits"),
        ("-" + "1" * 5000, "an integer of 5000 digits"),
        ("{", "Expecting"),
        (b"\xff", "utf-8"),
    ],
)
def test_json_of_strangers(text, message):
    with pytest.raises(ValueError, match=message):
        parsed_json(text)
    assert parsed_json("[9223372036854775807, 1e400]") == [2**63 - 1, float("inf")]


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, 0o702, 0o1777])
def test_folders_that_others_can_write_to(mode, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    if mode & 0o022:
        with pytest.raises(PermissionError, match="others may write to it"):
            files.make_private(folder)
    else:
        files.make_private(folder)
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_may_stand_for_a_folder_or_not(tmp_path):
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    files.check_private(tmp_path / "link")
    with pytest.raises(NotADirectoryError, match="or a link to one"):
        files.check_private(tmp_path / "link", links=False)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="link"):
        files.make_private(tmp_path / "link")


def test_one_process_has_it(tmp_path):
    path = tmp_path / "lock"
    with held(path) as first, held(path) as second:
        assert (first, second) == (True, False)
    with held(path) as again:
        assert again


def test_it_ends_with_its_process(tmp_path):
    code = "import sys, time; from pathlib import Path; from lightning_egeria.core.programs.files import held\n"
    code += "with held(Path(sys.argv[1])) as free: print(free, flush=True); time.sleep(60)"
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        with held(path) as free:
            assert not free
        process.kill()
        process.wait()
        with held(path) as free:
            assert free
