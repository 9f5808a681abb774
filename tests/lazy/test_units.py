"""Calls of frozen layers: run later in their modes, with what they returned beside tensors."""

import pytest
import torch

from lightning_egeria.caching.record.units import Context, UnitCall, constants_of
from lightning_egeria.errors import CacheError

X = torch.randn(4, 3)


def layer(x):
    return torch.mm(x, x.T), torch.is_grad_enabled(), len(x)


def call(**modes):
    return UnitCall(layer, ("cpu",), Context.current(("cpu",))._replace(**modes))


def test_a_call_runs_in_its_own_modes():
    cast = (("cpu", True, torch.bfloat16),)
    assert call()(X)[0].dtype == torch.float32
    product, grad, _ = call(grad=False, autocast=cast)(X)
    assert (product.dtype, grad) == (torch.bfloat16, False)
    assert torch.is_grad_enabled()


def test_another_number_than_before_is_an_error():
    run = UnitCall(layer, ("cpu",), Context.current(("cpu",)), constants_of(layer(X)))
    assert constants_of(run(X)) == (True, 4)
    with pytest.raises(CacheError, match="Leave out FrozenPrefixCache"):
        run(X[:3])
