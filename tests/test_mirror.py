"""The tests mirror the package: each module has its own test file."""

import re

import pytest
from leftovers import REPOSITORY

PACKAGE = REPOSITORY / "lightning_egeria"
CORE = ("programs", "batches", "network", "profiling", "snapshots", "distributed", "lazy", "stores", "training")
METHODS = ("freezing", "caching", "selecting", "partial", "goodput", "tuning", "pipelining")
ROOMS = (*CORE, *METHODS, "cluster", "report", "demos", "cli", "workflow")
LONGEST_TEST_FILE, LONGEST_NAME = 500, 60  # lines, characters


@pytest.mark.parametrize("room", ROOMS)
def test_each_module_has_a_test_file(room):
    modules = [path.stem for path in (PACKAGE / room).glob("*.py") if path.stem != "__init__"]
    assert modules
    missing = [name for name in modules if not (REPOSITORY / "tests" / room / f"test_{name}.py").is_file()]
    assert missing == []


def test_tests_and_names_are_short():
    for path in sorted((REPOSITORY / "tests").rglob("*.py")):
        text = path.read_text()
        assert len(text.splitlines()) <= LONGEST_TEST_FILE, path.name
        names = re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)
        assert [name for name in names if len(name) > LONGEST_NAME] == [], path.name
