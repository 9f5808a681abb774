import os

import pytest

from lightning_egeria.cli.methods import CONFIGURABLE
from lightning_egeria.errors import ArgumentError
from lightning_egeria.jobs.experiments import (
    arguments_of,
    checkpoint_overrides,
    composed,
    cost_key,
    facts_of,
    overrides_for,
)
from lightning_egeria.jobs.optimisations import Choice, choose

ROOT = "data.root=/x"


def facts(experiment, *overrides):
    return facts_of(composed(arguments_of(experiment, overrides)))


def test_what_is_known_of_experiments():
    scratch = facts("cifar10_resnet20", ROOT, "size=small")
    assert (scratch.pretrained, scratch.epochs, scratch.schedule, scratch.augmented) == (False, 40, "steps", True)
    tuned = facts("finetune_imagenette_resnet20", ROOT, "model.weights=w", "size=tight")
    assert (tuned.pretrained, tuned.epochs, tuned.schedule, tuned.augmented) == (True, 6, "smooth", False)
    assert (scratch.own_model, scratch.kind, tuned.kind) == (False, "steps", "tuned")
    own = composed(["trainer=cpu"])
    own.model._target_ = "mine.Model"
    assert facts_of(own).own_model
    ranks = facts("default", "trainer=ddp", "scheduler=none")
    assert (ranks.ranks, ranks.strategy, ranks.schedule, ranks.augmented) == (2, "ddp", "constant", False)


def test_variables_are_those_of_the_job_and_of_nobody_after_it():
    before = dict(os.environ)
    config = composed(
        ["experiment=cifar10_resnet20", "data.root=${oc.env:EGERIA_DATA_X}"], {**os.environ, "EGERIA_DATA_X": "/d"}
    )
    assert config.data.root == "/d"
    assert dict(os.environ) == before
    with pytest.raises(ArgumentError, match="EGERIA_DATA_Y"):
        composed(["experiment=cifar10_resnet20", "data.root=${oc.env:EGERIA_DATA_Y}"])


def test_costs_belong_to_code_data_and_network_not_to_settings():
    one = composed(["trainer=cpu"])
    assert cost_key(one, "c") == cost_key(
        composed(["trainer=cpu", "seed=3", "trainer.max_epochs=7", "optimizer=adamw"]), "c"
    )
    others = [composed(["trainer=cpu", change]) for change in ("model.net.depth=8", "data.batch_size=8", "trainer=ddp")]
    assert len({cost_key(one, "c"), cost_key(one, "d"), *(cost_key(other, "c") for other in others)}) == 5


def test_overrides_switch_methods():
    options = {"cache": {"host_bytes": "5"}, "partial": {"min_share": "0.5", "layer_modules": ["a", "b"]}}
    choices = [Choice(name, name in options, "", options.get(name, {})) for name in CONFIGURABLE]
    found = overrides_for(choices, False)
    assert [one for one in found if not one.endswith("=none")] == [
        "callbacks=partial",
        "cache=disk",
        "cache.host_bytes=5",
        "callbacks.partial.min_share=0.5",
        "callbacks.partial.layer_modules=[a,b]",
    ]
    config = composed(
        ["trainer=cpu", *found, *checkpoint_overrides(5)],
        {**os.environ, "EGERIA_CHECKPOINTS": "/x"},
    )
    assert list(config.callbacks) == ["partial", "resuming"]
    on = [Choice(name, name == "freezing", "", {"policy": {"patience": "2"}}) for name in CONFIGURABLE]
    assert {"callbacks=finetuning", "cache=none", "callbacks.freezing.policy.patience=2"} <= set(
        overrides_for(on, True)
    )
    both = [Choice(name, name in ("freezing", "tuning"), "") for name in CONFIGURABLE]
    assert list(composed(overrides_for(both, True)).callbacks) == ["freezing", "tuning"]
    assert composed(overrides_for([Choice(name, False, "") for name in CONFIGURABLE], True)).callbacks == {}


@pytest.mark.parametrize("method", CONFIGURABLE)
def test_each_method_can_be_asked_for(method):
    choices = choose({method: True}, facts("default"))
    assert [choice.method for choice in choices if choice.on] == [method]
    config = composed(overrides_for(choices, False))
    assert config[method] if CONFIGURABLE[method].wraps_data else [*config.callbacks] == [method]
