import json
import os
import shlex
import subprocess
import sys
import time
from urllib.parse import quote

import pytest

from lightning_egeria.errors import CompilationError, DescriptionError
from lightning_egeria.jobs.compiler import Compiler
from lightning_egeria.jobs.optimisations import Measured
from lightning_egeria.jobs.rules import read_description
from support.jobs.described import described

DIGITS = ["model.net.depth=8", "trainer=cpu", "trainer.max_epochs=30", "scheduler=stepdecay"]


def compiled(tmp_path, description, measured=lambda key: None):
    return Compiler(tmp_path / "runs", tmp_path / "locks", measured).compile(description)


def experiment(folder, *overrides, **keys):
    text = json.dumps({"experiment": "default", "overrides": [*DIGITS, *overrides]})
    return described(folder, entry=text, **keys)


def test_the_run_directory_has_all_that_runs(tmp_path):
    (tmp_path / "train.py").write_text("print(1)")
    keys = {"entry.files": "[train.py]", "environment.variables": '{A: "x\\ny"}'}
    (one,) = compiled(tmp_path, described(tmp_path, **keys))
    names = {path.relative_to(one.path).as_posix() for path in one.path.rglob("*") if path.is_file()}
    assert names == {
        "job.json",
        "manifest.json",
        "explanation.txt",
        "code/train.py",
        "requirements.lock",
        "provenance.json",
    }
    job = json.loads((one.path / "job.json").read_text())
    assert job["entry"] == {"command": "echo hello", "experiment": None, "files": ["train.py"], "overrides": []}
    assert job["environment"]["variables"] == {"A": "x\ny"}
    assert job["methods"] == {}
    assert str(tmp_path) not in "".join(path.read_text() for path in one.path.rglob("*") if path.is_file())


def test_the_same_description_has_the_same_name_anywhere(tmp_path):
    names = [compiled(tmp_path / place, described(tmp_path / place))[0].path.name for place in "ab"]
    assert names[0] == names[1]
    changed = compiled(tmp_path, described(tmp_path, retries=1))[0].path.name
    assert changed != names[0]


def test_a_changed_requirement_file_or_commit_has_another(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    (tmp_path / "lock.txt").write_text("numpy==2.0.0\n")
    (tmp_path / "train.py").write_text("1")
    keys = {"entry.files": "[train.py]", "environment.lock": "lock.txt"}

    def name():
        return compiled(tmp_path, described(tmp_path, **keys))[0].path.name

    names = [name()]
    for file, text in (("lock.txt", "numpy==2.0.1\n"), ("train.py", "2")):
        (tmp_path / file).write_text(text)
        names.append(name())
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-qm", "one")
    names.append(name())
    git("commit", "-qm", "two", "--allow-empty")
    names.append(name())
    (tmp_path / "train.py").write_text("3")
    names.append(name())
    assert len(set(names)) == len(names) == 6
    (one,) = compiled(tmp_path, described(tmp_path, **keys))
    assert "+3" in (one.path / "changes.patch").read_text()


def test_a_sweep_is_one_run_for_each_combination(tmp_path):
    found = compiled(tmp_path, described(tmp_path, sweep="{A: [1, 2], B: [x, y]}"))
    assert [one.name for one in found] == ["hello.0", "hello.1", "hello.2", "hello.3"]
    assert [one.job["environment"]["variables"] for one in found][1] == {"A": "1", "B": "y"}


def test_auto_chooses_and_writes_what_egeria_train_gets(tmp_path):
    (one,) = compiled(tmp_path, experiment(tmp_path))
    assert [choice.method for choice in one.choices if choice.on] == ["freezing"]
    assert "callbacks=freezing" in one.job["entry"]["overrides"]
    assert "freezing: on: from scratch, the learning rate falls in steps" in (one.path / "explanation.txt").read_text()
    (off,) = compiled(tmp_path, experiment(tmp_path), lambda key: Measured(5.0, 30))
    assert "callbacks=none" in off.job["entry"]["overrides"]
    assert one.job["cost_key"] == off.job["cost_key"]


def test_options_of_a_method_reach_it(tmp_path):
    wanted = "{freezing: {policy: {tolerance: 1e-3}}, cache: true}"
    (one,) = compiled(tmp_path, experiment(tmp_path, optimisations=wanted))
    assert {"callbacks.freezing.policy.tolerance=1e-3", "cache=disk"} <= set(one.job["entry"]["overrides"])


@pytest.mark.parametrize(
    ("overrides", "keys", "expected"),
    [
        (["trainer.max_epoch=3"], {}, "Did you mean 'trainer.max_epochs'"),
        (["model=resnt20"], {}, "Did you mean 'resnet20'"),
        (["trainer.max_epochs=many"], {}, "trainer.max_epochs: lightning.Trainer expects"),
        ([], {"optimisations": "{freezing: {tolerence: 1}}"}, "callbacks.freezing.tolerence: no such key"),
        (["trainer=ddp"], {}, "it trains 2 ranks, but resources has 1 devices"),
    ],
)
def test_mistakes_in_an_experiment_are_found_before_it_runs(overrides, keys, expected, tmp_path):
    with pytest.raises(DescriptionError, match="entry=") as caught:
        compiled(tmp_path, experiment(tmp_path, *overrides, **keys))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"entry.files": "[../x]"}, "'../x' leaves the folder"),
        ({"entry.files": "[link]"}, "'link' leaves the folder"),
        ({"entry.files": "['*.c']"}, "matches no file"),
        ({"environment.lock": "../lock"}, "leaves the folder"),
        ({"environment.lock": "none"}, "there is no such file"),
        ({"environment.lock": "loose"}, "line 1: expected name==version, got 'numpy'"),
        ({"environment.requirements": "index"}, "Options and addresses belong into pip's own settings"),
        ({"data": "{a: {path: none}}"}, "there is no such file or folder"),
        ({"data": "{a: {path: loose, digest: 'sha256:" + "0" * 64 + "'}}"}, "loose has the digest sha256:"),
        ({"environment.secrets": "[NOT_SET_ANYWHERE]"}, "NOT_SET_ANYWHERE is not set here"),
        ({"environment.secrets": "[TOKEN]", "entry.command": "curl x?hidden-value"}, "would be written to job.json"),
    ],
)
def test_what_cannot_be_compiled_is_said_with_its_line(keys, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "hidden-value")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to("/etc/hostname")
    (folder / "loose").write_text("numpy\n")
    (folder / "index").write_text("--index-url http://user:password@x\n")
    with pytest.raises(CompilationError, match="=") as caught:
        compiled(tmp_path, described(folder, **keys))
    assert expected in str(caught.value)
    assert "hidden-value" not in str(caught.value)
    assert not list((tmp_path / "runs").glob("*")) if (tmp_path / "runs").exists() else True


def test_a_command_needs_no_torch(tmp_path):
    described(tmp_path)
    code = (
        "import sys\nfrom lightning_egeria.command import main\n"
        f"main(['jobs', '--home', {str(tmp_path / 'home')!r}, 'submit', '--dry-run', {str(tmp_path / 'job.yaml')!r}])\n"
        "assert not {'torch', 'lightning', 'hydra', 'scipy', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("kind", ["device", "pipe", "link to a device"])
@pytest.mark.parametrize("key", ["data.x", "entry.files", "environment.lock"])
def test_what_is_no_file_does_not_hold_up_the_compiler(kind, key, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    where = "/dev/zero" if kind == "device" else "odd"
    digest = f"sha256:{'0' * 64}"
    values = {"data.x": f"{{path: {where}, digest: '{digest}'}}", "entry.files": f"[{where}]"}
    value = values.get(key, where)
    began = time.monotonic()
    with pytest.raises(CompilationError):
        compiled(tmp_path, described(folder, **{key: value}))
    assert time.monotonic() - began < 10


def test_files_are_measured_before_they_are_read(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "large.bin").touch()
    os.truncate(folder / "large.bin", 3 * 2**40)
    with pytest.raises(CompilationError, match="larger than 104857600 bytes"):
        compiled(tmp_path, described(folder, **{"entry.files": "[large.bin]"}))


@pytest.mark.parametrize("pattern", ["**/**/**/**/**/x", "a/**/b/**/c", "***", "**x/../*"])
def test_a_pattern_takes_no_time_of_its_choice(pattern, tmp_path):
    with pytest.raises(CompilationError, match=r"is no pattern|leaves the folder|matches no file"):
        compiled(tmp_path, described(tmp_path / "folder", **{"entry.files": f"['{pattern}']"}))


def test_links_to_folders_do_not_multiply_what_a_pattern_looks_at(tmp_path):
    folder = tmp_path / "folder"
    (folder / "in" / "deep").mkdir(parents=True)
    for name in ("a.py", "in/b.py", "in/deep/c.py"):
        (folder / name).write_text("1")
    for name in ("one", "two", "three"):
        (folder / name).symlink_to(".")
    described_with = {"entry.files": f"['{'*/' * 30}x']"}
    began = time.monotonic()
    with pytest.raises(CompilationError, match="matches no file"):
        compiled(tmp_path, described(folder, **described_with))
    assert time.monotonic() - began < 10
    for pattern, wanted in {
        "*.py": ["a.py"],
        "in/*.py": ["in/b.py"],
        "*/*/*.py": ["in/deep/c.py"],
        "**/*.py": ["a.py", "in/b.py", "in/deep/c.py"],
        "one/a.py": ["one/a.py"],  # named, not guessed
    }.items():
        (run,) = compiled(tmp_path, described(folder, **{"entry.files": f"['{pattern}']"}))
        code = run.path / "code"
        assert sorted(path.relative_to(code).as_posix() for path in code.rglob("*.py")) == wanted


def test_patterns_are_counted(tmp_path):
    patterns = [f"{'x' * number}*" for number in range(201)]
    with pytest.raises(CompilationError, match="has 201 patterns, expected at most 200"):
        compiled(tmp_path, described(tmp_path / "folder", **{"entry.files": json.dumps(patterns)}))


@pytest.mark.parametrize("secret", ['pa"ss\\word123', "abc/def+ghi=", "it's a secret", "größe&<b>"])
@pytest.mark.parametrize("write", [str, json.dumps, quote, lambda value: quote(value, safe=""), shlex.quote])
def test_no_secret_is_written_however_it_is_quoted(secret, write, tmp_path, monkeypatch):
    monkeypatch.setenv("TOK", secret)
    described(tmp_path / "folder")
    command = json.dumps(["curl", f"-Hkey:{write(secret)}"])
    text = f"name: a\nentry: {{command: {command}}}\nenvironment: {{secrets: [TOK]}}"
    (tmp_path / "folder" / "job.yaml").write_text(text)
    with pytest.raises(CompilationError, match=r"the value of TOK would be written to job\.json"):
        compiled(tmp_path, read_description(tmp_path / "folder" / "job.yaml"))
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
