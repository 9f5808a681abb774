import hashlib
import json
import os

import pytest

from lightning_egeria.errors import CompilationError, ExecutionError
from lightning_egeria.jobs import rundirs
from lightning_egeria.jobs.rundirs import check_owned, digest_of, read_run_directory, write_run_directory

CONTENTS = {
    "job.json": b'{"name": "a", "entry": {"command": "x"}}',
    "code/train.py": b"print(1)",
    "explanation.txt": b"because",
}


def test_the_name_is_a_digest_of_what_runs(tmp_path):
    place = write_run_directory(tmp_path / "one", CONTENTS)
    again = write_run_directory(tmp_path / "two", {**CONTENTS, "explanation.txt": b"another reason"})
    other = write_run_directory(tmp_path / "one", {**CONTENTS, "code/train.py": b"print(2)"})
    assert place.name == again.name != other.name
    assert place.name == hashlib.sha256((place / "manifest.json").read_bytes()).hexdigest()[:16] == "4c3e7f1d6ec033e5"
    job = read_run_directory(place)
    assert (job["name"], job["entry"]["command"], job["retries"]) == ("a", "x", 0)
    assert write_run_directory(tmp_path / "one", CONTENTS) == place


def test_it_is_read_only(tmp_path):
    place = write_run_directory(tmp_path, CONTENTS)
    assert [path for path in [place, *place.rglob("*")] if path.stat().st_mode & 0o222] == []
    rundirs.remove(place)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "", "a\nb", "a\\b"])
def test_nothing_leaves_it(name, tmp_path):
    with pytest.raises(CompilationError, match="leaves the run directory"):
        write_run_directory(tmp_path / "runs", {name: b""})
    assert not (tmp_path / "x").exists()


def test_a_changed_one_does_not_run(tmp_path):
    place = write_run_directory(tmp_path, CONTENTS)
    code = place / "code" / "train.py"
    code.chmod(0o600)
    code.write_text("print(3)")
    with pytest.raises(ExecutionError, match=r"code/train.py has changed since it was compiled"):
        read_run_directory(place)
    manifest = place / "manifest.json"
    manifest.chmod(0o600)
    manifest.write_text("{}")
    with pytest.raises(ExecutionError, match="the manifest has changed"):
        read_run_directory(place)
    with pytest.raises(ExecutionError, match="cannot read the run directory"):
        read_run_directory(tmp_path / "none")


@pytest.mark.parametrize("name", ["code/json.py", "code/sitecustomize.py", "new", "code/.hidden"])
@pytest.mark.parametrize("kind", ["file", "link", "link to a folder", "pipe"])
def test_what_the_manifest_does_not_list_does_not_run(name, kind, tmp_path):
    place = write_run_directory(tmp_path / "runs", CONTENTS)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere.py").write_text("print('INJECTED')")
    for folder in (place, place / "code"):
        folder.chmod(0o700)
    if kind == "file":
        (place / name).write_text("print('INJECTED')")
    elif kind == "pipe":
        os.mkfifo(place / name)
    else:
        (place / name).symlink_to(tmp_path / ("elsewhere" if "folder" in kind else "elsewhere.py"))
    place.chmod(0o555)
    with pytest.raises(ExecutionError, match="was added since it was compiled"):
        read_run_directory(place)


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd", "pipe"])
def test_a_listed_file_is_no_link_or_pipe(target, tmp_path):
    place = write_run_directory(tmp_path, CONTENTS)
    (place / "code").chmod(0o700)
    (place / "code" / "train.py").unlink()
    if target == "pipe":
        os.mkfifo(place / "code" / "train.py")
    else:
        (place / "code" / "train.py").symlink_to(target)
    with pytest.raises(ExecutionError, match="cannot read the run directory"):
        read_run_directory(place)


@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_the_digest_of_what_is_no_file(target, tmp_path):
    if target == "pipe":
        target = tmp_path / "pipe"
        os.mkfifo(target)
    with pytest.raises(OSError, match="no ordinary file"):
        digest_of(rundirs.Path(target))


@pytest.mark.parametrize(
    "slurm",
    [
        {"partition": "x\nrm -rf ~"},
        {"account": "$(id)"},
        {"extra": {"comment": "a\nsh"}},
        {"extra": {"nice\nsh": "1"}},
        {"extra": {"nice": 1}},
    ],
)
def test_no_option_of_sbatch_is_more_than_a_word(slurm, tmp_path):
    """sbatch reads them from a script: a second line of an option would be a command."""
    job = json.dumps({"name": "a", "entry": {"command": "x"}, "slurm": slurm}).encode()
    place = write_run_directory(tmp_path, {**CONTENTS, "job.json": job})
    with pytest.raises(ExecutionError, match="describes no job"):
        read_run_directory(place)


def test_a_folder_of_others_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    with pytest.raises(ExecutionError, match="others could have written here"):
        check_owned(tmp_path)
    tmp_path.chmod(0o700)
    check_owned(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ExecutionError, match="others could have written here"):
        check_owned(tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundirs.files, "write_once", full)
    with pytest.raises(CompilationError, match="No space left on device"):
        write_run_directory(tmp_path, CONTENTS)
    assert list(tmp_path.iterdir()) == []


def test_digests_of_folders_know_names_and_contents(tmp_path):
    folders = []
    for place, files in enumerate([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "2", "b": "1"}, {"a": "12"}]):
        folders.append(tmp_path / str(place))
        folders[-1].mkdir()
        for name, text in files.items():
            (folders[-1] / name).write_text(text)
    digests = [digest_of(folder) for folder in folders]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert digest_of(folders[0] / "a") == f"sha256:{hashlib.sha256(b'1').hexdigest()}"
