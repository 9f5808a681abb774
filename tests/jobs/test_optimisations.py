import dataclasses

import pytest

from benchmarks.proof import evidence as measured
from lightning_egeria.cli.methods import CONFIGURABLE
from lightning_egeria.jobs import evidence as rules
from lightning_egeria.jobs.evidence import evidence
from lightning_egeria.jobs.optimisations import Facts, Measured, choose

SCRATCH = Facts(trains=True, pretrained=False, epochs=40, schedule="steps", augmented=True)
TUNED = Facts(trains=True, pretrained=True, epochs=6, schedule="smooth", augmented=False)


def chosen(facts, wanted="auto"):
    return {choice.method: choice for choice in choose(wanted, facts)}


def on(facts, wanted="auto"):
    return [name for name, choice in chosen(facts, wanted).items() if choice.on]


@pytest.mark.parametrize(
    ("facts", "expected", "because"),
    [
        (SCRATCH, ["freezing"], "from scratch, the learning rate falls in steps: 0.89 (0.82 to 0.89 on 3 tasks)"),
        (TUNED, ["freezing", "cache"], "fine-tuning: 0.62 (0.32 to 0.99 on 5 tasks) of the plain time"),
        (dataclasses.replace(SCRATCH, measured=Measured(12, 40)), [], "about 12 s; the shortest one that was measured"),
        (dataclasses.replace(TUNED, epochs=1), [], "the run has 1 epochs; the shortest one that was measured had 4"),
        (dataclasses.replace(SCRATCH, schedule="smooth"), [], "0.95 (0.89 to 1.01 on 4 tasks)"),
        (dataclasses.replace(SCRATCH, schedule="constant"), [], "at a constant learning rate: measured on none"),
        (dataclasses.replace(SCRATCH, epochs=5), [], "had 12"),
        (Facts(trains=False), [], "a command takes no methods"),
    ],
)
def test_auto_follows_the_evidence_and_says_so(facts, expected, because):
    assert on(facts) == expected
    assert because in chosen(facts)["freezing"].reason


def test_the_file_is_what_its_command_writes_from_the_runs_of_the_proof():
    """A result that changes must change what `auto` says, or chooses."""
    assert measured.evidence() == evidence()


def comparison(workload, time, points=0.0, shorter=2.0, methods=("freezing",), kind="steps", augmented=True):
    return {
        "workload": workload,
        "kind": kind,
        "augmented": augmented,
        "epochs": 12,
        "plain_s": 100,
        "methods": [*methods],
        "time": time,
        "points": points,
        "than_as_short": shorter,
    }


@pytest.mark.parametrize(
    ("rows", "found", "says"),
    [
        ([("a", 0.5), ("b", 0.8), ("c", 1.1)], True, "0.80 (0.50 to 1.10 on 3 tasks) of the plain time, +0.0 points"),
        ([("a", 0.5), ("b", 0.95), ("c", 1.1)], False, "needed: 0.9 of the time, -1 and +1 points"),
        ([("a", 0.5, -2.0), ("b", 0.5, -1.5), ("c", 0.5)], False, "-1.5 points"),
        ([("a", 0.5, 0.0, 0.1), ("b", 0.5, 0.0, 0.9), ("c", 0.5)], False, "+0.9 against a plain run as short"),
        ([("a", 0.5, 0.0, None), ("b", 0.5, 0.0, None), ("c", 0.5, 0.0, None)], False, "+0.0 against"),
        ([("a", 0.5), ("a", 0.6), ("b", 0.5)], False, "measured on 2 of the 3 tasks needed to judge"),
        ([], False, "measured on none. Ask for it by name"),
    ],
)
def test_methods_pay_if_they_did_on_most_of_three_tasks(rows, found, says, monkeypatch):
    monkeypatch.setattr(rules, "evidence", lambda: {"comparisons": [comparison(*row) for row in rows]})
    assert rules.pays("steps", ["freezing"])[0] is found
    assert says in rules.pays("steps", ["freezing"])[1]


def test_the_cache_is_compared_with_freezing_alone(monkeypatch):
    rows = [
        comparison(task, time, methods=methods, kind="tuned", augmented=False)
        for task in "abc"
        for time, methods in ((0.8, ["freezing"]), (0.6, ["freezing", "cache"]))
    ]
    monkeypatch.setattr(rules, "evidence", lambda: {"comparisons": rows})
    assert rules.cache_adds("tuned", False) == (True, "0.75 (0.75 to 0.75 on 3 tasks) of the time of freezing alone")
    assert rules.cache_adds("tuned", True)[0] is False
    for row in rows:
        row["time"] = 0.8
    assert rules.cache_adds("tuned", False)[0] is False


def test_the_cache_alone_serves_what_a_model_keeps_frozen():
    own = dataclasses.replace(SCRATCH, schedule="smooth", own_model=True)
    for augmented in (False, None):  # the cache finds out itself whether samples change
        assert on(dataclasses.replace(own, augmented=augmented)) == ["cache"]
    assert "an entry would serve once" in chosen(own)["cache"].reason
    assert on(dataclasses.replace(own, augmented=False, strategy="FSDPStrategy")) == []
    assert "without any it cost 0.48 s at most" in chosen(dataclasses.replace(own, augmented=False))["cache"].reason
    assert "keep no module frozen" in chosen(dataclasses.replace(own, augmented=False, own_model=False))["cache"].reason


def test_a_longer_run_of_short_epochs_is_not_short():
    assert on(dataclasses.replace(TUNED, epochs=60, measured=Measured(12, 6))) == ["freezing", "cache"]


def test_the_cache_needs_samples_that_stay():
    augmented = chosen(dataclasses.replace(TUNED, augmented=True))
    assert "samples augmented at random: measured on none" in augmented["cache"].reason
    assert on(dataclasses.replace(TUNED, augmented=None)) == ["freezing", "cache"]
    assert "off with fsdp" in chosen(dataclasses.replace(TUNED, strategy="fsdp"))["cache"].reason


def test_what_the_description_says_goes_first():
    choices = chosen(SCRATCH, {"partial": {"min_share": "0.5"}, "freezing": False})
    assert [name for name, choice in choices.items() if choice.on] == ["partial"]
    assert choices["partial"].options == {"min_share": "0.5"}
    assert choices["cache"].reason == "the description leaves it out"
    assert on(TUNED, "none") == []


def test_each_method_has_one_choice_with_a_reason():
    for facts in (SCRATCH, TUNED, Facts(trains=False)):
        choices = choose("auto", facts)
        assert [choice.method for choice in choices] == list(CONFIGURABLE)
        assert all(choice.reason for choice in choices)
