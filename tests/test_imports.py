"""The rooms of the package, and its public names."""

import ast
import configparser
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_egeria

PACKAGE = Path(lightning_egeria.__file__).parent


def test_the_contracts_of_setup_cfg_are_kept():
    # Not in this process: import-linter disables every logger that exists.
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    linted = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize(
    ("contract", "folder", "others"),
    [("hydra", "", {"cli", "jobs", "command"}), ("torch-only", "core", {"training"})],
)
def test_a_contract_on_imports_from_outside_names_each_room(contract, folder, others):
    """The contracts of the layers are exhaustive by themselves."""
    parser = configparser.ConfigParser()
    parser.read(PACKAGE.parent / "setup.cfg")
    named = parser[f"importlinter:contract:{contract}"]["source_modules"].split()
    rooms = {one.name for one in pkgutil.iter_modules([str(PACKAGE / folder)])} - others
    missing = {".".join(filter(None, ("lightning_egeria", folder, room))) for room in rooms} - {*named}
    assert not missing, f"add {missing} to the contract {contract} of setup.cfg, or to the exceptions of this test"


@pytest.mark.parametrize(("room", "other"), [("freezing", "caching"), ("caching", "freezing")])
def test_no_text_names_the_other_method(room, other):
    """An import by name would get around the contracts."""
    for path in (PACKAGE / room).glob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        named = [text for text in texts if isinstance(text, str) and re.search(rf"lightning_egeria\.{other}\b", text)]
        assert named == [], path


def test_public_names_are_those_of_the_reference():
    page = (PACKAGE.parent / "docs" / "api.md").read_text()
    documented = re.findall(r"^\.\. auto(?:class|function):: lightning_egeria\.(\w+)$", page, re.MULTILINE)
    assert sorted(documented) == lightning_egeria.__all__, "docs/api.md and lightning_egeria/__init__.pyi differ"
    assert all(hasattr(lightning_egeria, name) for name in lightning_egeria.__all__)
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    typed = [one.asname for node in ast.walk(stub) if isinstance(node, ast.ImportFrom) for one in node.names]
    assert sorted(typed) == lightning_egeria.__all__, "each name of the stub needs a line: from MODULE import A as A"


def test_a_worker_imports_neither_lightning_nor_torchmetrics():
    """They take longer to import than torch, and each worker would."""
    program = (
        "import sys, lightning_egeria.core.snapshots.worker, lightning_egeria.freezing.reference;"
        "sys.exit(any(name in sys.modules for name in ('lightning', 'torchmetrics')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent)
