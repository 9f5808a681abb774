"""Every exception is one of the package's own."""

import inspect

import pytest

from lightning_egeria import errors

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_one_except_catches_all(kind):
    assert issubclass(kind, errors.EgeriaError)
    assert inspect.getdoc(kind)
    with pytest.raises(errors.EgeriaError, match="what happened"):
        raise kind("what happened")


def test_wrong_arguments_are_value_errors_too():
    assert issubclass(errors.ArgumentError, ValueError)


def test_too_few_layers_is_one_way_to_have_no_chain():
    assert issubclass(errors.TooFewLayersError, errors.LayerChainError)


def test_nothing_is_near():
    assert errors.near_match("zzz", ["depth", "width"]) == ""
