"""Which methods may train in one run."""

import itertools
from types import SimpleNamespace

import pytest
import yaml

import lightning_egeria
from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, PrefixFreezing, StructuredPartialBackprop
from lightning_egeria.cli.configuration import CONFIG_DIR
from lightning_egeria.cli.methods import CONFIGURABLE, METHODS, WRAPPERS
from lightning_egeria.core.training.methods import FREEZING, Method, check_combination, methods_of
from lightning_egeria.errors import UnsupportedError
from support.models import Classifier, fit, loader

REFUSED = [("goodput", "partial"), ("goodput", "selecting"), ("goodput", "tuning"), ("selecting", "tuning")]


def check_names(*names):
    check_combination([METHODS[name] for name in names])


@pytest.mark.parametrize(
    ("one", "other"), [*itertools.combinations(("cache", "freezing", "goodput", "partial", "selecting", "tuning"), 2)]
)
def test_each_pair_is_allowed_or_refused(one, other):
    reason = METHODS[one].reason_against(METHODS[other])
    assert reason == METHODS[other].reason_against(METHODS[one])
    if (one, other) not in REFUSED:
        check_names(one, other)
        return
    with pytest.raises(UnsupportedError, match=f"{one} and {other} cannot train in one run: {reason}. Remove one of"):
        check_names(other, one)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "pipelining"])
def test_a_pipeline_runs_alone(method):
    with pytest.raises(UnsupportedError, match=r" and .* cannot train in one run: a graph pipeline runs without other"):
        check_names("pipelining", method)


def test_the_first_refusal_is_the_message():
    with pytest.raises(UnsupportedError, match=r"goodput and partial cannot .* of all ranks .* Remove one of them"):
        check_names("selecting", "freezing", "goodput", "partial")


def test_what_may_train_together_passes():
    check_names("freezing", "cache", "selecting", "partial")
    check_names("freezing", "cache", "partial", "tuning")
    check_names("freezing", "cache", "goodput")
    check_names("pipelining")
    check_names()


class Strategy:
    egeria_method = METHODS["pipelining"]


class Foreign:
    egeria_method = "something else"


def test_methods_of_a_trainer():
    freezing, partial = KnowledgeGuidedFreezing(), StructuredPartialBackprop()
    data = FrozenPrefixCache(loader())
    trainer = SimpleNamespace(callbacks=[freezing, Foreign(), partial], datamodule=data, strategy=Strategy())
    assert [method.name for method in methods_of(trainer)] == ["pipelining", "freezing", "partial", "cache"]
    assert list(methods_of(SimpleNamespace(callbacks=[], datamodule=None))) == []


@pytest.mark.parametrize("name", METHODS)
def test_the_public_class_of_a_method_has_its_declaration_and_its_option(name):
    method = METHODS[name]
    public = {one: getattr(lightning_egeria, one) for one in lightning_egeria.__all__}
    mine = {f"lightning_egeria.{one}" for one, kind in public.items() if getattr(kind, "egeria_method", None) is method}
    assert len(mine) == 1, f"{name}: one class with `egeria_method = METHOD` must be public, found {mine or 'none'}"
    assert set(method.apart_from) <= {*METHODS, "*"}
    assert set(method.around) <= set(WRAPPERS)
    if method.option:
        path = CONFIG_DIR / f"{method.option}.yaml"
        assert path.exists(), f"{name}: its option {path} is missing"
        options = yaml.safe_load(path.read_text())
        assert (options if method.wraps_data else options[name])["_target_"] in mine
        assert not method.wraps_data or (path.parent / "none.yaml").exists()


def test_data_modules_nest_in_this_order():
    assert [name for name in WRAPPERS if name in ("cache", "goodput", "selecting")] == ["goodput", "cache", "selecting"]
    assert set(WRAPPERS) < set(CONFIGURABLE)


class Toy(PrefixFreezing):
    """A method of a user, outside of the package."""

    egeria_method = Method(
        name="toy", label="a toy", strategies=("XLAStrategy",), manual="it is one", apart_from={"partial": "both play"}
    )


class LearnedToy(Toy):
    egeria_method = Method(name="learned", label="a toy", manual="it is one")


class OtherFreezing(PrefixFreezing):
    egeria_method = Method(name="other", label="other freezing", freezes=True)


def test_a_class_of_a_user_is_refused_with_what_it_declares():
    with pytest.raises(UnsupportedError, match="partial and toy cannot train in one run: both play"):
        fit(Classifier(), Toy(), StructuredPartialBackprop())
    with pytest.raises(UnsupportedError, match=r"a toy is not tested with SingleDeviceStrategy\. Use one device, or"):
        fit(Classifier(), Toy())
    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="a toy does not run with manual optimization: it is one"):
        fit(module, LearnedToy())


@pytest.mark.parametrize("other", [PrefixFreezing, KnowledgeGuidedFreezing, OtherFreezing])
def test_one_callback_freezes_in_a_run(other):
    class Mine(PrefixFreezing):
        egeria_method = FREEZING

    with pytest.raises(UnsupportedError, match=r"freezing is there twice|both decide which layer modules are frozen"):
        fit(Classifier(), Mine(), other())
