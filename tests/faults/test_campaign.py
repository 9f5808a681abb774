"""Each fault once; `make test-faults` injects each many times."""

import random

import pytest

import faults.campaign as campaign
from faults.held import FAULTS, CannotError

# A worker takes some seconds to start, a rank that is stopped as many until the other gives up.
LONG = {"reference worker", "one of two ranks"}
# Each of these is much like another that is injected: SIGINT and SIGTERM at a line like SIGKILL there, torn pages like
# flipped bits.
ALIKE = {
    "interrupted",
    "terminated",
    "truncated",
    "pages_wrong",
    "quota",
    "slow_reads",
    "clock_jumps",
    "other_order",
    "length_changes",
    "items_change",
    "files_wrong",
}
SEEDS = {"raised": 3, "torn": 2}  # with 0, the one has a worker, the other is killed more often than it has to be


def marks_of(fault):
    slow = fault.where in LONG or "worker" in fault.what or fault.name in ALIKE
    return [pytest.mark.slow] if slow else []


@pytest.mark.parametrize("fault", [pytest.param(f, id=f.name, marks=marks_of(f)) for f in FAULTS])
def test_fault(fault, tmp_path):
    try:
        fault.inject(random.Random(f"{fault.name} {SEEDS.get(fault.name, 0)}"), tmp_path)
    except CannotError as reason:
        pytest.skip(str(reason))


def test_what_does_not_hold_is_counted_and_its_folder_kept(tmp_path, monkeypatch):
    def fails(chance, folder):
        campaign.check(False, "it is not")

    fault = campaign.Fault("nowhere", "nothing", "be something", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    count, failure = campaign.inject(fault, 7)
    assert count == 1
    assert "seed 7" in failure
    assert "it is not" in failure
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("fails-7-")
    monkeypatch.setattr(campaign, "FAULTS", [fault])
    assert "| nowhere | nothing | be something | 1 | 1 |" in campaign.table({"fails": [1, 1]})


def test_the_published_table_has_every_fault_and_all_held():
    rows = [line.split(" | ") for line in campaign.TABLE.read_text().splitlines() if line.startswith("| ")][2:]
    assert [(row[0].removeprefix("| "), row[1]) for row in rows] == [(fault.where, fault.what) for fault in FAULTS]
    assert all(int(row[3]) > 0 for row in rows)
    assert all(row[4].removesuffix(" |") == "0" for row in rows)
