import dataclasses
import re

import pytest
from leftovers import REPOSITORY

from lightning_egeria.jobs.optimisations import MIN_EPOCHS_FROM_SCRATCH, TOOK, Facts, Measured, choose
from lightning_egeria.jobs.schema import METHODS

SCRATCH = Facts(trains=True, pretrained=False, epochs=40, schedule="steps", augmented=True)
TUNED = Facts(trains=True, pretrained=True, epochs=6, schedule="smooth", augmented=False)


def chosen(facts, wanted="auto", **more):
    return {choice.method: choice for choice in choose(wanted, facts, **more)}


def on(facts, wanted="auto", **more):
    return [name for name, choice in chosen(facts, wanted, **more).items() if choice.on]


@pytest.mark.parametrize(
    ("facts", "expected", "because"),
    [
        (SCRATCH, ["freezing"], "the learning rate falls in steps over 40 epochs"),
        (TUNED, ["freezing", "cache"], "the weights are pre-trained"),
        (dataclasses.replace(SCRATCH, ranks=2, link_gbit=1.0), ["freezing"], "2 ranks share a link of 1 Gbit/s"),
        (
            dataclasses.replace(SCRATCH, ranks=2, measured=Measured(900, 40, 0, 0.4)),
            ["freezing"],
            "waited for each other 40%",
        ),
        (dataclasses.replace(SCRATCH, measured=Measured(12, 40)), [], "the run takes about 12 s"),
        (dataclasses.replace(TUNED, epochs=1), [], "with 1 epochs the run is over"),
        (dataclasses.replace(SCRATCH, schedule="smooth"), [], "0.89 to 1.01"),
        (dataclasses.replace(SCRATCH, schedule="constant"), [], "at a constant learning rate nothing freezes"),
        (dataclasses.replace(SCRATCH, epochs=5), [], "5 epochs are too few"),
        (Facts(trains=False), [], "a command takes no methods"),
    ],
)
def test_auto_follows_the_evidence_and_says_so(facts, expected, because):
    assert on(facts) == expected
    assert because in chosen(facts)["freezing"].reason


RESULTS = REPOSITORY / "benchmarks" / "proof" / "results"
ROWS = {"freezing": "freezing", "cache": "freezing and cache"}
WORKLOADS = {
    "tuned": [
        *(f"finetune_imagenette_resnet{layers}/{size}" for layers in (20, 56) for size in ("small", "tight")),
        *(f"trashnet_efficientnet/{size}" for size in ("small", "small_low")),
        *(f"{name}_efficientnet/{size}" for name in ("cifar10", "camvid") for size in ("small", "small_high")),
        *(f"banking77_minilm/{size}" for size in ("small", "small_high", "full")),
    ],
    "steps": ["cifar10_resnet20/small", "cifar10_resnet56/small", "imagenette_resnet50/small"],
    "smooth": [
        "cifar10_resnet20_cosine/small",
        "cifar10_mobilenetv2/small",
        "multi30k_transformer/small",
        "camvid_deeplabv3/small",
        "squad_bert/small",
    ],
}


@pytest.mark.parametrize("kind", TOOK, ids="-".join)
def test_the_figures_are_those_of_the_proof(kind):
    """A result that changes must change what `auto` says, or chooses."""
    found = []
    for workload in WORKLOADS[kind[0]]:
        lines = [line.split("|") for line in (RESULTS / workload / "table.md").read_text().splitlines() if "|" in line]
        column = [cell.strip() for cell in lines[0]].index("training time")
        found += [float(line[column]) for line in lines if line[1].strip() == ROWS[kind[1]]]
    assert len(found) >= 3
    assert (min(found), max(found)) == TOOK[kind]


def test_the_fewest_epochs_are_those_of_a_run_that_froze():
    experiments = REPOSITORY / "conf" / "experiment"
    small = [
        re.search(r"small: \{max_epochs: (\d+)", (experiments / f"{workload.split('/')[0]}.yaml").read_text())
        for workload in WORKLOADS["steps"]
    ]
    assert min(int(found[1]) for found in small) == MIN_EPOCHS_FROM_SCRATCH


def test_the_cache_is_left_out_where_it_gains_nothing():
    assert (
        "runs from scratch took 0.83 to 0.96" in chosen(dataclasses.replace(SCRATCH, augmented=False))["cache"].reason
    )


def test_a_longer_run_of_short_epochs_is_not_short():
    assert on(dataclasses.replace(TUNED, epochs=60, measured=Measured(12, 6))) == ["freezing", "cache"]


def test_the_cache_needs_samples_that_stay():
    assert "augmented at random" in chosen(dataclasses.replace(TUNED, augmented=True))["cache"].reason
    assert "nobody knows" in chosen(dataclasses.replace(TUNED, augmented=None))["cache"].reason
    assert "off with fsdp" in chosen(dataclasses.replace(TUNED, strategy="fsdp"))["cache"].reason


def test_what_the_description_says_goes_first():
    choices = chosen(SCRATCH, {"partial": {"min_share": "0.5"}, "freezing": False})
    assert [name for name, choice in choices.items() if choice.on] == ["partial"]
    assert choices["partial"].options == {"min_share": "0.5"}
    assert choices["cache"].reason == "the description leaves it out"
    assert on(TUNED, "none") == []


def test_what_cannot_run_here_stays_off():
    why = {"freezing": "this version has none"}
    assert on(TUNED, available=why.get) == []
    assert chosen(TUNED, available=why.get)["freezing"].reason.startswith("this version has none. Otherwise on")


def test_each_method_has_one_choice_with_a_reason():
    for facts in (SCRATCH, TUNED, Facts(trains=False)):
        choices = choose("auto", facts)
        assert [choice.method for choice in choices] == list(METHODS)
        assert all(choice.reason for choice in choices)
