"""Which methods may train in one run."""

import itertools
from types import SimpleNamespace

import pytest
from models import Classifier, fit, loader

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, StructuredPartialBackprop
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.training.methods import METHODS, check_combination, methods_of, reason_against

REFUSED = {("goodput", "selecting"), ("goodput", "partial"), ("goodput", "tuning"), ("selecting", "tuning")}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(list(METHODS)[:-1], 2)))
def test_each_pair_is_allowed_or_refused(one, other):
    assert (reason_against(one, other) is not None) == ((one, other) in REFUSED)
    assert reason_against(one, other) == reason_against(other, one)


@pytest.mark.parametrize("method", list(METHODS)[:-1])
def test_a_pipeline_runs_alone(method):
    with pytest.raises(UnsupportedError, match=f"{method} and pipelining cannot train in one run: a graph pipeline"):
        check_combination(["pipelining", method])


def test_the_first_refusal_is_the_message():
    with pytest.raises(UnsupportedError, match=r"goodput and selecting cannot .* bias the .* Remove one of them"):
        check_combination(["goodput", "freezing", "selecting", "partial"])


def test_what_may_train_together_passes():
    check_combination(["freezing", "caching", "selecting", "partial"])
    check_combination(["pipelining"])
    check_combination([])


class Strategy:
    egeria_method = "pipelining"


class Foreign:
    egeria_method = "something else"


def test_methods_of_a_trainer():
    freezing, partial = KnowledgeGuidedFreezing(), StructuredPartialBackprop()
    data = FrozenPrefixCache(loader())
    trainer = SimpleNamespace(callbacks=[freezing, Foreign(), partial], datamodule=data, strategy=Strategy())
    assert list(methods_of(trainer)) == ["pipelining", "freezing", "partial", "caching"]
    assert list(methods_of(SimpleNamespace(callbacks=[], datamodule=None))) == []


class Goodput(KnowledgeGuidedFreezing):
    egeria_method = "goodput"


def test_a_refused_pair_does_not_start():
    with pytest.raises(UnsupportedError, match="goodput and partial cannot train in one run"):
        fit(Classifier(), Goodput(), StructuredPartialBackprop())
