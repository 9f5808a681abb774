"""Both exchanges keep one interface."""

import inspect

import pytest

from lightning_egeria.distributed.contributors import ContributorMean
from lightning_egeria.distributed.exchange import GradientExchange
from lightning_egeria.distributed.rescaled import RescaledMean


@pytest.mark.parametrize("kind", [ContributorMean, RescaledMean])
def test_an_exchange_has_all_methods(kind):
    assert issubclass(kind, GradientExchange)
    for name, method in inspect.getmembers(GradientExchange, inspect.isfunction):
        own = getattr(kind, name)
        if name not in ("prepare", "__init__"):
            assert own is not method, name
            assert inspect.signature(own) == inspect.signature(method), name
    assert kind.replaces_ddp == (kind is ContributorMean)


def test_prepare_does_nothing_by_default():
    GradientExchange().prepare()
