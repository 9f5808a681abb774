"""Replaced forwards are put back, whoever replaced what in between."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.forwards import ForwardReplacements
from support.networks import assert_same_attributes, attributes


def doubled(original):
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


class TestForwardReplacements:
    def test_replaced_and_restored(self):
        module, x = nn.Linear(4, 3), torch.rand(2, 4)
        before, expected = attributes(module), module(x)
        replacements = ForwardReplacements()
        replacements.replace(module, doubled)
        assert torch.equal(module(x), 2 * expected)
        assert torch.equal(module.forward(x), 2 * expected)
        replacements.restore()
        assert_same_attributes(before, module)
        assert torch.equal(module(x), expected)

    @pytest.mark.parametrize("first", [0, 1])
    def test_two_that_are_restored_in_any_order_leave_nothing(self, first):
        module = nn.Linear(4, 3)
        before, both = attributes(module), [ForwardReplacements(), ForwardReplacements()]
        for one in both:
            one.replace(module, doubled)
        both[first].restore()
        assert "forward" in vars(module)
        both[1 - first].restore()
        assert_same_attributes(before, module)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
    def test_a_copy_computes_with_its_own_weights_unseen(self, copied):
        net, x, calls = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.rand(2, 4), []

        def seen(original):
            return lambda *args: [calls.append(1), original(*args)][1]

        replacements = ForwardReplacements()
        for module in net:
            replacements.replace(module, doubled)
            replacements.replace(module, seen)  # around the other
        other = copied(net)
        with torch.no_grad():
            other[0].weight.zero_()
            other[0].bias.fill_(1)
        assert torch.equal(other(x), torch.ones(2, 3))
        assert calls == []
        assert torch.equal(copied(other)(x), torch.ones(2, 3))

    def test_a_copy_keeps_a_forward_of_the_user(self):
        module, x = nn.Linear(4, 3), torch.rand(2, 4)
        module.forward = torch.neg
        ForwardReplacements().replace(module, doubled)
        assert torch.equal(copy.deepcopy(module)(x), -x)

    def test_restored_twice(self):
        module = nn.Linear(4, 3)
        before = attributes(module)
        replacements = ForwardReplacements()
        replacements.replace(module, doubled)
        replacements.restore()
        replacements.restore()
        assert_same_attributes(before, module)

    def test_keeps_a_forward_that_the_user_had_put_on_the_instance(self):
        module, x = nn.Linear(4, 3), torch.rand(2, 4)
        theirs = functools.partial(nn.functional.linear, weight=torch.ones(3, 4))
        module.forward = theirs
        replacements = ForwardReplacements()
        replacements.replace(module, doubled)
        assert torch.equal(module(x), 2 * theirs(x))
        replacements.restore()
        assert module.forward is theirs

    def test_leaves_a_forward_that_was_put_there_later(self):
        module, x = nn.Linear(4, 3), torch.rand(2, 4)
        expected = module(x)
        replacements = ForwardReplacements()
        replacements.replace(module, doubled)
        wrapped = module.forward
        module.forward = lambda x: wrapped(x) + 1
        theirs = module.forward
        replacements.restore()
        assert module.forward is theirs
        assert torch.equal(module(x), 2 * expected + 1)

    def test_one_inside_the_other(self):
        module, x = nn.Linear(4, 3), torch.rand(2, 4)
        before, expected = attributes(module), module(x)
        outer, inner = ForwardReplacements(), ForwardReplacements()
        outer.replace(module, doubled)
        inner.replace(module, doubled)
        assert torch.equal(module(x), 4 * expected)
        inner.restore()
        assert torch.equal(module(x), 2 * expected)
        outer.restore()
        assert_same_attributes(before, module)

    def test_twice_on_the_same_module(self):
        module, x = nn.Linear(4, 3), torch.rand(2, 4)
        before, expected = attributes(module), module(x)
        replacements = ForwardReplacements()
        replacements.replace(module, doubled)
        replacements.replace(module, doubled)
        assert torch.equal(module(x), 4 * expected)
        replacements.restore()
        assert_same_attributes(before, module)

    def test_keeps_signature_and_hooks(self):
        module, seen = nn.Linear(4, 3), []
        handle = module.register_forward_hook(lambda *_: seen.append("hook"))
        replacements = ForwardReplacements()
        replacements.replace(module, doubled)
        assert module.forward.__name__ == "forward"
        module(torch.rand(2, 4))
        assert seen == ["hook"]
        replacements.restore()
        handle.remove()

    def test_the_state_dict_knows_nothing_of_it(self):
        module = nn.Linear(4, 3)
        keys = list(module.state_dict())
        replacements = ForwardReplacements()
        replacements.replace(module, doubled)
        assert list(module.state_dict()) == keys
        replacements.restore()
