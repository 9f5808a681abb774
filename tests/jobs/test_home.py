import os
from pathlib import Path

import pytest

from lightning_egeria.command import main
from lightning_egeria.core.programs import files
from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.home import Home


def test_it_is_this_users_alone(tmp_path):
    home = Home(tmp_path / "a" / "b")
    assert home.path.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in home.path.iterdir()} == {"runs", "jobs", "environments", "locks"}
    home.path.chmod(0o755)
    Home(home.path)
    assert home.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o022])
def test_whatever_the_umask_is(umask, tmp_path):
    before = os.umask(umask)
    try:
        home = Home(tmp_path / "a" / "b")
        home.history().close()
        with files.held(home.path / "queue.lock"):
            pass
        files.adding(home.path / "queue.log").close()
    finally:
        os.umask(before)
    for path in [tmp_path / "a", home.path, *home.path.iterdir()]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("part", [".", "environments", "locks", "runs", "jobs"])
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777, 0o720])
def test_one_that_others_can_write_to_is_refused(part, mode, tmp_path):
    home = Home(tmp_path / "home")
    (home.path / part).chmod(mode)
    with pytest.raises(QueueError, match=r"others may write to it.*remove what others could have written"):
        Home(home.path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("attack", ["home", "environments", "link", "link above", "folder above"])
def test_what_another_user_has_made_is_refused(attack, tmp_path):
    home = Home(tmp_path / "a" / "home")
    path = home.path
    if attack == "link":
        path = tmp_path / "link"
        path.symlink_to(home.path)
        os.chown(path, 12345, 12345, follow_symlinks=False)
    elif attack == "link above":
        (tmp_path / "link").symlink_to(tmp_path / "a")
        path = tmp_path / "link" / "home"
        os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    else:
        os.chown({"home": path, "folder above": path.parent}.get(attack, path / attack), 12345, 12345)
    with pytest.raises(QueueError, match="belongs to another user"):
        Home(path)


def test_a_folder_above_that_everyone_can_write_to(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(QueueError, match="everyone may write to this folder above it"):
        Home(tmp_path / "open" / "home")
    (tmp_path / "open").chmod(0o1777)  # as /tmp
    Home(tmp_path / "open" / "home")


def test_a_link_of_this_user_may_lead_to_it(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir(mode=0o700)
    assert Home(tmp_path / "link").path == tmp_path / "link"


def test_one_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(QueueError, match="Name another folder with egeria jobs --home DIR, or with EGERIA_JOBS"):
        Home(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(QueueError, match="Permission denied"):
        Home(tmp_path / "home")


def test_the_default(monkeypatch, tmp_path):
    monkeypatch.delenv("EGERIA_JOBS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Home.default() == tmp_path / "egeria"
    monkeypatch.setenv("EGERIA_JOBS", "/x")
    assert str(Home.default()) == "/x"


def test_a_user_without_a_home_directory(monkeypatch, capsys):
    for name in ("EGERIA_JOBS", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(SystemExit) as ended:
        main(["jobs", "--help"])
    assert ended.value.code == 0
    assert main(["jobs", "ps"]) == 2
    assert "this user has no home directory. Name a folder with egeria jobs --home DIR" in capsys.readouterr().err
