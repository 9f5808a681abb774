"""Arguments that belong to a policy lead to it."""

import inspect

import hydra
import pytest
from hydra.errors import InstantiationException

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, ScriptedPolicy, SlopePolicy
from lightning_egeria.errors import ArgumentError


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (FreezingPolicy, "tolerance"),
        (FreezingPolicy, "patience"),
        (FreezingPolicy, "pretrained"),
        (SlopePolicy, "refresh_every_n_evaluations"),
        (SlopePolicy, "window_evaluations"),
        (ScriptedPolicy, "schedule"),
    ],
)
def test_an_argument_of_a_policy_names_the_policy(policy, name):
    with pytest.raises(ArgumentError) as error:
        KnowledgeGuidedFreezing(**{name: 1})
    assert str(error.value) == (
        f"KnowledgeGuidedFreezing has no argument {name!r}. It belongs to the policy: "
        f"KnowledgeGuidedFreezing({policy.__name__}({name}=...))."
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("tolerence", "KnowledgeGuidedFreezing(FreezingPolicy(tolerance=...))"),
        ("evaluation_sample", "'evaluation_samples'"),
    ],
)
def test_a_misspelt_argument_has_a_near_match(name, near):
    with pytest.raises(ArgumentError) as error:
        KnowledgeGuidedFreezing(**{name: 1})
    assert str(error.value) == f"KnowledgeGuidedFreezing has no argument {name!r}. Did you mean {near}?"


def test_several_are_named_in_one_message():
    with pytest.raises(ArgumentError, match=r"'patience'.*'schedule'"):
        KnowledgeGuidedFreezing(patience=2, schedule={})


def test_a_subclass_with_such_an_argument_names_itself():
    class Freezing(KnowledgeGuidedFreezing):
        pass

    with pytest.raises(ArgumentError, match=r"^Freezing has .*: Freezing\(FreezingPolicy\(patience=...\)\)"):
        Freezing(patience=2)


@pytest.mark.parametrize("points", [-0.1, float("nan")])
def test_an_accepted_loss_is_not_negative(points):
    with pytest.raises(ArgumentError, match=r"^max_loss_points must be at least 0, got"):
        KnowledgeGuidedFreezing(max_loss_points=points)


@pytest.mark.parametrize("policy", [SlopePolicy(), ScriptedPolicy({2: 1}), FreezingPolicy(trial=False)])
def test_an_accepted_loss_that_a_policy_would_ignore_is_refused(policy):
    with pytest.raises(ArgumentError, match=rf"^max_loss_points .* this {type(policy).__name__} makes none"):
        KnowledgeGuidedFreezing(policy, max_loss_points=1)
    KnowledgeGuidedFreezing(policy)


def test_a_class_in_the_place_of_a_policy_is_named():
    with pytest.raises(ArgumentError, match=r"^policy must be an instance, got the class FreezingPolicy\. Write Fr"):
        KnowledgeGuidedFreezing(FreezingPolicy)


def test_an_argument_like_no_other_is_a_type_error_as_everywhere():
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        KnowledgeGuidedFreezing(colour=None)


def test_the_signature_is_explicit():
    parameters = inspect.signature(KnowledgeGuidedFreezing).parameters
    assert list(parameters)[:3] == ["policy", "layer_modules", "freeze_until"]
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_hydra_passes_the_message_on():
    config = {"_target_": "lightning_egeria.KnowledgeGuidedFreezing", "tolerance": 1e-3}
    with pytest.raises(InstantiationException, match=r"It belongs to the policy: .*FreezingPolicy\(tolerance=...\)"):
        hydra.utils.instantiate(config)
