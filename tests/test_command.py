"""The command `egeria`: one parser for all, one table of exit statuses."""

import argparse
import importlib
import re
import subprocess
import sys

import pytest

import lightning_egeria
from lightning_egeria import command
from lightning_egeria.command import COMMANDS, main
from lightning_egeria.errors import PlanError
from support.leftovers import REPOSITORY


def shown(capsys, *arguments):
    """Run the command; return its exit status and what it printed."""
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    return status, *capsys.readouterr()


def test_version_and_overview(capsys):
    assert shown(capsys, "--version") == (0, f"lightning_egeria {lightning_egeria.__version__}\n", "")
    for arguments in ((), ("--help",)):
        status, printed, _ = shown(capsys, *arguments)
        assert status == 0
        assert all(f"egeria {name} {example}" in printed for name, (_, _, example) in COMMANDS.items())
    status, _, errors = shown(capsys, "jbos")
    assert (status, "invalid choice: 'jbos'" in errors) == (2, True)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])
def test_help_has_an_example_which_the_parser_takes(name, capsys):
    _, printed, _ = shown(capsys, name, "--help")
    example = f"egeria {name} {COMMANDS[name][2]}"
    assert f"example: {example}" in printed
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[name][0]).configure(parser)
    assert callable(parser.parse_args(COMMANDS[name][2].split()).run)


@pytest.mark.parametrize("name", ["jobs", "cache"])
def test_without_a_command_of_its_own_it_prints_its_help(name, capsys):
    status, printed, errors = shown(capsys, name)
    assert (status, errors) == (0, "")
    assert printed == shown(capsys, name, "--help")[1]


def test_train_becomes_the_application_of_hydra(monkeypatch):
    monkeypatch.setattr(command.os, "execv", lambda path, arguments: (_ for _ in ()).throw(SystemExit([*arguments])))
    with pytest.raises(SystemExit) as ended:
        main(["train", "model=resnet20", "--help"])
    assert ended.value.code == [sys.executable, "-P", "-m", "lightning_egeria.cli.train", "model=resnet20", "--help"]


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (PlanError("no \x1b[2Jway"), 2, "egeria plan: no ?[2Jway\n"),
        (OSError(28, "No space left on device", "/x"), 2, "egeria plan: /x: No space left on device\n"),
        (ModuleNotFoundError("x", name="matplotlib.figure"), 2, "pip install 'lightning-egeria[report]'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_statuses(raised, status, message, monkeypatch, capsys):
    from lightning_egeria.methods.pipelining import command as room

    def fail(options):
        raise raised

    monkeypatch.setattr(room, "configure", lambda parser: parser.set_defaults(run=fail))
    found, _, errors = shown(capsys, "plan")
    assert (found, errors.endswith(message)) == (status, True)


def test_a_module_that_is_no_extra_is_not_hidden(monkeypatch):
    from lightning_egeria.methods.pipelining import command as room

    def fail(options):
        import no_such_module  # noqa: F401

    monkeypatch.setattr(room, "configure", lambda parser: parser.set_defaults(run=fail))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main(["plan"])


def test_a_closed_pipe_ends_it_quietly():
    script = "from lightning_egeria.command import main; import sys; sys.exit(main(['plan', 'dlrm', '--devices=4']))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), errors) == (1, "")


def test_the_pages_name_every_command():
    page = (REPOSITORY / "docs" / "commands.md").read_text()
    assert re.findall(r"^\| `egeria (\w+)`", page, re.MULTILINE) == [*COMMANDS]
