"""Every exception is one of the package's own."""

import ast
import inspect

import pytest

from lightning_egeria import errors
from support.leftovers import REPOSITORY

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_one_except_catches_all(kind):
    assert issubclass(kind, errors.EgeriaError)
    assert inspect.getdoc(kind)
    with pytest.raises(errors.EgeriaError, match="what happened"):
        raise kind("what happened")


def test_no_other_module_has_exceptions_of_its_own():
    """Or an `except EgeriaError` would miss them."""
    names = {kind.__name__ for kind in KINDS}
    found = {}
    for path in (REPOSITORY / "lightning_egeria").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
            exceptions = {base for base in bases if base in names or base.endswith(("Error", "Exception"))}
            if exceptions and path.name != "errors.py":
                found[node.name] = path.name
    assert found == {"_Enough": "tracing.py"}  # ends a trace, and is caught there


def test_a_store_that_cannot_be_used_is_one_of_them():
    assert issubclass(errors.StoreBusyError, errors.StoreError)


def test_wrong_arguments_are_value_errors_too():
    assert issubclass(errors.ArgumentError, ValueError)


def test_too_few_layers_is_one_way_to_have_no_chain():
    assert issubclass(errors.TooFewLayersError, errors.LayerChainError)


def test_nothing_is_near():
    assert errors.near_match("zzz", ["depth", "width"]) == ""
