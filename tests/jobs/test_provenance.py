import contextlib
import os
import shlex
import subprocess
from contextlib import nullcontext

import pytest

from lightning_egeria.errors import CompilationError
from lightning_egeria.jobs import provenance
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.provenance import installed_distributions, provenance_of
from support.jobs.described import described


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    return subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout


def repository(folder, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q")
    for name, text in contents.items():
        (folder / name).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "x", "--allow-empty")
    return folder


def test_the_commit_and_what_is_not_committed(tmp_path, monkeypatch):
    assert provenance_of(tmp_path).content()["commit"] is None
    repository(tmp_path, a="1\n")
    found = provenance_of(tmp_path)
    assert (found.commit, found.changes) == (git(tmp_path, "rev-parse", "HEAD").strip(), "")
    (tmp_path / "a").write_bytes(b"2\n\xff\n")
    assert "-1" in provenance_of(tmp_path).changes
    monkeypatch.setattr(provenance, "LARGEST_DIFF", 3)
    with pytest.raises(CompilationError, match=r"larger than 3 bytes\. Commit them"):
        provenance_of(tmp_path)


def test_the_patch_is_that_of_git(tmp_path):
    """Added, removed, executable, binary, in a folder, odd names; only what lies below the folder."""
    top = repository(tmp_path / "r", a="1\n", gone="1\n", run="1\n")
    (top / "sub").mkdir()
    for name in ("sub/ö b", "sub/plain"):
        (top / name).write_text("1\n")
    git(top, "add", ".")
    git(top, "commit", "-qm", "y")
    (top / "a").write_bytes(bytes(range(256)))
    (top / "gone").unlink()
    (top / "run").chmod(0o755)
    (top / "sub/ö b").write_text("2\n")
    (top / "new").write_text("3\n")
    git(top, "add", "new")
    (top / "unknown").write_text("4\n")
    for folder in (top, top / "sub"):
        wanted = git(folder, "diff", "--binary", "--no-renames", "HEAD", "--", ".")
        assert provenance_of(folder).changes == wanted
    assert "unknown" not in provenance_of(top).changes


def test_other_kinds_of_repositories(tmp_path):
    """A linked working tree, names in one file, objects in a pack, a split index, settings that change the content."""
    top = repository(tmp_path / "r", a="1\n", b="1\r\n")
    git(top, "gc", "-q")
    git(top, "update-index", "--split-index")
    git(top, "worktree", "add", "-q", str(tmp_path / "linked"))
    (tmp_path / "linked" / "a").write_text("2\n")
    assert provenance_of(top).changes == ""
    assert "+2" in provenance_of(tmp_path / "linked").changes
    git(top, "config", "core.fileMode", "false")
    (top / "a").chmod(0o755)
    assert provenance_of(top).changes == ""
    git(tmp_path, "init", "-q", "--object-format=sha256", "s")
    other = repository(tmp_path / "s", a="1\n")
    (other / "a").write_text("2\n")
    assert (len(provenance_of(other).commit), "+2" in provenance_of(other).changes) == (64, True)
    git(tmp_path, "init", "-q", "empty")
    assert provenance_of(tmp_path / "empty").commit is None


def test_files_that_only_a_filter_could_compare(tmp_path):
    top = repository(tmp_path, **{".gitattributes": "*.bin filter=lfs\n", "a.bin": "pointer\n", "b": "1\n"})
    (top / "a.bin").write_text("what the filter makes of it\n")
    (top / "b").write_text("2\n")
    found = provenance_of(top)
    assert (found.filtered, found.content()["filtered"]) == (("a.bin",), ["a.bin"])
    assert ("a.bin" in found.changes, "+2" in found.changes) == (False, True)


# --- attacks: each would write the file `ran` ------------------------------------------------------------------------


def in_settings(*names, attributes="* filter=evil diff=evil merge=evil"):
    def attack(tmp_path, program):
        top = repository(tmp_path / "r", **{".gitattributes": f"{attributes}\n", "train.py": "1\n"})
        for name in names:
            git(top, "config", name, program)
        (top / "train.py").write_text("2\n")
        return top

    return attack


def embedded_bare(tmp_path, program):
    """It survives a clone: a folder of the repository is itself a repository, and job.yaml lies there."""
    top = repository(tmp_path / "source", readme="x")
    inner = top / "inner"
    repository(inner, **{".gitattributes": "* filter=evil\n", "train.py": "1\n"})
    git(inner, "config", "core.bare", "false")
    git(inner, "config", "core.worktree", ".")
    git(inner, "config", "filter.evil.clean", program)
    for name in ("HEAD", "config", "index", "objects", "refs"):
        (inner / ".git" / name).rename(inner / name)
    for kept in ("objects", "refs"):
        for folder in (inner / kept).rglob("*"):
            if folder.is_dir() and not any(folder.iterdir()):
                (folder / "keep").write_text("")
    subprocess.run(["rm", "-rf", inner / ".git"], check=True)
    (inner / "train.py").write_text("2\n")
    git(top, "add", "-f", ".")
    git(top, "commit", "-qm", "y")
    git(tmp_path, "clone", "-q", str(top), "cloned")
    return tmp_path / "cloned" / "inner"


def in_submodule(tmp_path, program):
    part = repository(tmp_path / "part", **{".gitattributes": "* filter=evil\n", "a": "1\n"})
    top = repository(tmp_path / "r", b="1\n")
    git(top, "submodule", "add", "-q", str(part), "part")
    git(top, "commit", "-qm", "y")
    git(top / "part", "config", "filter.evil.clean", program)
    git(top / "part", "config", "core.fsmonitor", program)
    (top / "part" / "a").write_text("2\n")
    return top


def partial_clone(tmp_path, program):
    top = repository(tmp_path / "r", a="1\n" * 50)
    blob = git(top, "rev-parse", "HEAD:a").strip()
    (top / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    git(top, "config", "core.repositoryformatversion", "1")
    for name, value in (
        ("extensions.partialClone", "origin"),
        ("remote.origin.url", str(top)),
        ("remote.origin.promisor", "true"),
        ("remote.origin.uploadpack", program),
    ):
        git(top, "config", name, value)
    (top / "a").write_text("2\n")
    return top


def included(tmp_path, program):
    top = in_settings()(tmp_path, program)
    (top / ".git" / "more").write_text(f'[filter "evil"]\n\tclean = {program.replace(chr(34), chr(39))}\n')
    git(top, "config", f"includeIf.gitdir:{top}/.path", "more")
    git(top, "config", "include.path", "more")
    return top


def of_worktree(tmp_path, program):
    top = in_settings()(tmp_path, program)
    git(top, "config", "extensions.worktreeConfig", "true")
    git(top, "config", "--worktree", "filter.evil.clean", program)
    return top


def hooks(tmp_path, program):
    top = in_settings()(tmp_path, program)
    folder = tmp_path / "hooks"
    for place in (folder, top / ".git" / "hooks"):
        place.mkdir(exist_ok=True)
        for name in ("post-index-change", "fsmonitor-watchman", "reference-transaction", "pre-commit", "post-checkout"):
            (place / name).write_text(f"#!/bin/sh\n{program}\n")
            (place / name).chmod(0o755)
    git(top, "config", "core.hooksPath", str(folder))
    git(top, "config", "core.fsmonitor", "true")
    return top


def elsewhere(tmp_path, program):
    """A file in the place of the repository's folder leads to one outside of it."""
    top = in_settings("filter.evil.clean")(tmp_path, program)
    (top / ".git").rename(tmp_path / "moved")
    (top / ".git").write_text(f"gitdir: {tmp_path / 'moved'}\n")
    return top


ATTACKS = {
    "clean": in_settings("filter.evil.clean"),
    "smudge": in_settings("filter.evil.smudge"),
    "process": in_settings("filter.evil.process"),
    "all filters": in_settings(
        "filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "filter.evil.required"
    ),
    "other case": in_settings("FILTER.evil.CLEAN"),
    "fsmonitor": in_settings("core.fsmonitor"),
    "external diff": in_settings("diff.external"),
    "diff command": in_settings("diff.evil.command", "diff.evil.textconv"),
    "merge driver": in_settings("merge.evil.driver"),
    "transport": in_settings("core.sshCommand", "core.gitProxy", "core.askPass", "remote.origin.uploadpack"),
    "pager and editor": in_settings("core.pager", "core.editor", "pager.diff", "interactive.diffFilter", "gpg.program"),
    "alias": in_settings("alias.diff", "alias.rev-parse", "alias.config", "alias.check-attr"),
    "credential": in_settings("credential.helper", "core.alternateRefsCommand"),
    "embedded bare repository": embedded_bare,
    "submodule": in_submodule,
    "partial clone": partial_clone,
    "included settings": included,
    "settings of a working tree": of_worktree,
    "hooks": hooks,
    "a repository elsewhere": elsewhere,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_compiling_in_a_strangers_repository_runs_nothing(attack, tmp_path):
    ran = tmp_path / "ran"
    top = ATTACKS[attack](tmp_path, f'sh -c "touch {ran}"')
    ran.unlink(missing_ok=True)  # commands of the setup may have run it
    home = Home(tmp_path / "home")
    with home.history() as history:
        fails = pytest.raises(CompilationError, match="unable to read") if attack == "partial clone" else nullcontext()
        with fails:
            home.compiler(history).compile(described(top))
    assert not ran.exists()


@pytest.mark.parametrize("attack", ["clean", "submodule", "partial clone", "fsmonitor"])
def test_the_attacks_are_attacks(attack, tmp_path):
    """Git itself runs them."""
    top = ATTACKS[attack](tmp_path, f'sh -c "touch {tmp_path / "ran"}"')
    (tmp_path / "ran").unlink(missing_ok=True)
    subprocess.run(["git", "-C", top, "diff", "HEAD"], check=False, capture_output=True)
    assert (tmp_path / "ran").exists()


def test_filters_of_the_user_do_not_run_either(tmp_path, monkeypatch):
    """A repository chooses with its attributes which of them runs, on what content."""
    top = in_settings()(tmp_path, "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "filter.evil.clean")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", f"touch {tmp_path}/ran")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", f"touch {tmp_path}/ran")
    (tmp_path / ".gitconfig").write_text(f'[filter "evil"]\n\tclean = "touch {tmp_path}/ran"\n')
    assert provenance_of(top).filtered == ("train.py",)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["HEAD", "index", "config", "refs/heads/master", "packed-refs"])
@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_what_is_no_file_holds_nothing_up(name, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "LONGEST_S", 2)
    top = repository(tmp_path, a="1\n")
    git(top, "branch", "-m", "master")
    place = top / ".git" / name
    place.unlink(missing_ok=True)
    os.mkfifo(place) if kind == "pipe" else place.symlink_to("/dev/zero")
    with contextlib.suppress(CompilationError):
        provenance_of(top)


def test_no_program_of_the_working_folder_runs(tmp_path, monkeypatch):
    top = repository(tmp_path / "r", a="1\n")
    (top / "git").write_text(f"#!/bin/sh\ntouch {shlex.quote(str(tmp_path / 'ran'))}\n")
    (top / "git").chmod(0o755)
    monkeypatch.chdir(top)
    assert provenance_of(top).commit
    assert not (tmp_path / "ran").exists()


def test_the_environment_as_a_list():
    lines = installed_distributions().splitlines()
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0])
    assert any(line.startswith("torch==") for line in lines)
