"""The tables of the documents on jobs say what the code does."""

import dataclasses
import re

import pytest

from docs.tables import ROOT, TABLES, replaced
from lightning_egeria.cluster.hints import Hints
from lightning_egeria.jobs.editors import json_schema
from lightning_egeria.jobs.evidence import FEWEST_TASKS, MOST_TIME, POINT, evidence
from lightning_egeria.jobs.jobfolders import State, Status
from lightning_egeria.jobs.preparing import variables_for
from lightning_egeria.jobs.rundirs import read_run_directory
from support.jobs.described import described, folder_of

REFERENCE = (ROOT / "docs" / "jobs.md").read_text()
CARD = (ROOT / "lightning_egeria" / "jobs" / "README.md").read_text()


def rows(document, heading):
    """The cells of the rows of the first table below a heading."""
    table = re.search(rf"^## {heading}\n.*?\n(\|.*?)\n\n", document, re.DOTALL | re.MULTILINE)[1]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_as_it_is_made(name):
    path, lines = TABLES[name]
    document = path.read_text()
    assert replaced(document, name, lines()) == document, "run: python -m docs.tables"
    assert replaced(document, name, ["| other |"]) != document


def leaves(schema, prefix=""):
    for name, inner in schema["properties"].items():
        values = inner.get("additionalProperties")
        if "properties" in inner:
            yield from leaves(inner, f"{prefix}{name}.")
        elif isinstance(values, dict) and "properties" in values:
            yield from leaves(values, f"{prefix}{name}.NAME.")
        else:
            yield f"{prefix}{name}" + (".NAME" if isinstance(values, dict) else "")


def test_the_reference_names_the_keys_that_editors_are_told():
    assert [row[0].strip("`") for row in rows(REFERENCE, "Keys of a description")] == [*leaves(json_schema())]


def test_the_reference_names_all_states():
    told = {row[0].strip("`"): row[2] for row in rows(REFERENCE, "States")}
    assert [*told] == ["queued", "running", "preempted", "lost", "done", "failed", "cancelled"]
    assert told.keys() == {*State}
    assert {state for state, next in told.items() if next in ("none", "`queued`, by `resume`")} == {
        state for state in State if state.final
    }


def test_the_reference_names_all_hints():
    told = [name for row in rows(REFERENCE, "Hints") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(told) == sorted(field.name for field in dataclasses.fields(Hints))


def test_the_reference_names_all_variables(tmp_path):
    (tmp_path / "flowers").touch()
    folder = folder_of(tmp_path, described(tmp_path, data="{name: {path: flowers}}"))
    job = read_run_directory(next((tmp_path / "home" / "runs").iterdir()))
    found = variables_for(job, folder, Status(), {"EGERIA_DATA_NAME": "x"})
    told = {
        name
        for row in rows(REFERENCE, "What a job finds in its environment")
        for name in re.findall(r"`(\w+)`", row[0])
    }
    assert told == {name for name in found if name.startswith("EGERIA_") and name != "EGERIA_DEVICES"}


def test_the_card_names_the_limits_of_auto():
    assert f"at most {MOST_TIME:g} of the plain time" in CARD
    assert (FEWEST_TASKS, POINT) == (3, 1.0), "the card writes them as words"
    assert f"the cache cost at most {evidence()['cache_costs_s']:g} s." in CARD
