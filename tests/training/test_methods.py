"""Which methods may train in one run."""

import dataclasses
import importlib
import itertools
from types import SimpleNamespace

import pytest
import yaml
from conftest import REPOSITORY
from models import Classifier, fit, loader

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, PrefixFreezing, StructuredPartialBackprop
from lightning_egeria.core.training.methods import METHODS, Method, check_combination, methods_of, reason_against
from lightning_egeria.core.training.support import check_setup
from lightning_egeria.errors import UnsupportedError

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


@pytest.mark.parametrize("name", METHODS)
def test_each_declaration_is_that_of_its_class_and_its_option(name):
    method = METHODS[name]
    home, _, kind = method.home.rpartition(".")
    assert getattr(importlib.import_module(home), kind).egeria_method == name
    if method.group:
        option = yaml.safe_load((REPOSITORY / "conf" / method.group / f"{method.option}.yaml").read_text())
        entry = option.get(method.option, option)
        assert entry["_target_"] in (method.home, f"lightning_egeria.{kind}")
    assert set(method.apart_from) <= {*METHODS, "*"}


class Toy(PrefixFreezing):
    egeria_method = "toy"

    def check_trainer(self, trainer):
        check_setup(trainer, "toy")


def test_a_further_method_is_declared_once(monkeypatch):
    toy = Method("toy", "", "", "", ("XLAStrategy",), manual="it is a toy", apart_from={"partial": "both are toys"})
    monkeypatch.setitem(METHODS, "toy", toy)
    with pytest.raises(UnsupportedError, match="partial and toy cannot train in one run: both are toys"):
        fit(Classifier(), Toy(), StructuredPartialBackprop())
    with pytest.raises(UnsupportedError, match="toy is not tested with SingleDeviceStrategy"):
        fit(Classifier(), Toy())
    monkeypatch.setitem(METHODS, "toy", dataclasses.replace(toy, strategies=("SingleDeviceStrategy",)))
    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="toy does not run with manual optimization: it is a toy"):
        fit(module, Toy())
