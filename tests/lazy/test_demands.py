"""Who is asked for the value of a node, and what memory the values share."""

import pytest
import torch

from lightning_egeria.caching.record.meta import Meta
from lightning_egeria.caching.record.tensors import plain, show
from support.caching.lazies import ONE_ARGUMENT, Layers, Source, X


class Owner:
    """A batch that answers demands, and notes them."""

    def __init__(self, answer=None):
        self.asked_for, self.answer = [], answer

    def asked(self, node):
        self.asked_for.append(node)
        if node.value is None and self.answer is not None:
            node.value = self.answer(node)
        return node.value if node.value is not None else node.compute()


def frozen_of(source, lazy, function=torch.sin):
    """The lazy output of frozen layers."""
    with torch.no_grad():
        meta = Meta.of(function(torch.empty(tuple(lazy.shape))))
    (node,) = source.tape.record("layers", Layers(function), [lazy.node], ONE_ARGUMENT, [meta])
    return show(node)


def test_a_demand_is_one_with_frozen_layers_behind_it():
    owner = Owner()
    source = Source(X, owner=owner)
    batch = source.batch()
    assert (batch * 2).sum().equal((X * 2).sum())
    assert owner.asked_for == []
    output = frozen_of(source, batch)
    assert plain(output).equal(X.sin())
    assert owner.asked_for == [output.node]


def test_operations_behind_frozen_layers_are_demanded_as_a_whole():
    owner = Owner()
    source = Source(X, owner=owner)
    pooled = frozen_of(source, source.batch()).mul(2).sum(1)
    assert pooled.node.frozen
    assert owner.asked_for == []
    assert plain(pooled).equal(X.sin().mul(2).sum(1))
    assert owner.asked_for == [pooled.node]


def test_the_answer_is_what_the_batch_says():
    owner = Owner(answer=lambda node: torch.full(tuple(node.meta.shape), 3.0))
    source = Source(X, owner=owner)
    assert plain(frozen_of(source, source.batch())).eq(3).all()
    assert (source.loaded, source.touched) == ([], 0)


def test_without_a_batch_a_value_is_computed():
    source = Source(X)
    assert plain(frozen_of(source, source.batch())).equal(X.sin())


@pytest.mark.parametrize(
    "use", [lambda x: x.sum().item(), lambda x: x.numpy(), lambda x: repr(x), lambda x: bool(x[0, 0] > 5)]
)
def test_every_reader_asks(use):
    owner = Owner()
    source = Source(X, owner=owner)
    use(frozen_of(source, source.batch()))
    assert owner.asked_for


def test_a_step_that_learns_asks_for_the_tensors_themselves():
    owner = Owner()
    source = Source(X, owner=owner)
    weight = torch.ones(4, 4, requires_grad=True)
    output = frozen_of(source, source.batch()) @ weight
    assert type(output) is torch.Tensor
    output.sum().backward()
    assert weight.grad.equal(X.sin().T @ torch.ones(6, 4))
    assert len(owner.asked_for) == 1


class TestMemory:
    """Each value may have been served by itself; a change in place reaches all that share memory."""

    def parts(self, answer=None):
        owner = Owner(answer)
        source = Source(X, owner=owner)
        output = frozen_of(source, source.batch(), torch.sin)
        return output, output.view(6, 2, 2)

    @pytest.mark.parametrize("first", [0, 1])
    def test_a_view_that_was_served_alone_sees_the_change(self, first):
        values = {(6, 4): X.sin(), (6, 2, 2): X.sin().view(6, 2, 2).clone()}
        both = self.parts(lambda node: values[tuple(node.meta.shape)].clone())
        plain(both[first])
        both[first].zero_()
        assert all(plain(one).eq(0).all() for one in both)

    def test_without_a_view_nothing_else_changes(self):
        output, _ = self.parts()
        doubled = output * 2
        output.zero_()
        assert plain(doubled).equal(X.sin() * 2)
        assert plain(output).eq(0).all()

    def test_views_keep_their_values_without_a_change(self):
        output, view = self.parts()
        assert plain(view).equal(X.sin().view(6, 2, 2))
        assert plain(output).equal(X.sin())
