"""Looking for the layer chain, until there is one."""

import pytest
import torch
from torch import nn

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.training.search import LayerSearch
from lightning_egeria.errors import CheckpointError, TooFewLayersError
from support.networks import assert_same_attributes, attributes, deep_mlp


class Told:
    def __init__(self):
        self.warnings, self.lines = [], []

    def inform(self, text, once=None):
        self.lines.append(text)

    def warn(self, text, once=None):
        self.warnings.append(text)


@pytest.fixture
def told():
    return Told()


def search(told, layer_modules=None, freeze_until=None):
    return LayerSearch(Ranks(), told, layer_modules, freeze_until)


def found_in(searching, net):
    searching.start(net)
    loss = net(torch.rand(5, 4)).sum()
    return searching.chain(net, loss, [torch.optim.SGD(net.parameters(), lr=0.1)])


def test_the_chain_is_that_of_the_step(told):
    net = deep_mlp()
    expected = LayerChain.trace(net, lambda: net(torch.rand(5, 4)).sum())
    searching = search(told)
    assert not searching.is_looking
    assert found_in(searching, net) == expected
    assert not searching.is_looking
    assert searching.gathered is None
    assert told.warnings == []


def test_arguments_of_the_user_count(told):
    chain = found_in(search(told, ["0", "4", "7"], "0"), deep_mlp())
    assert (chain.names, chain.max_depth) == (("0", "4", "7"), 1)


def test_too_few_that_learn_are_told_and_may_be_more_later(told):
    net = deep_mlp()
    for part in net[:9]:
        part.requires_grad_(False)
    searching = search(told)
    assert found_in(searching, net) is None
    assert not searching.is_looking
    (text,) = told.warnings
    assert text == (
        "you have frozen '0.weight' and 9 more. FrozenPrefixCache alone serves frozen layers, without this callback, "
        "which has nothing more to freeze: Sequential has no layer modules, expected at least 2. Parameters that are "
        "not training yet: '0.weight' and 9 more. The callback looks for layer modules again at the start of each epoch"
    )
    assert searching.trainable.new_in(net) == []
    net.requires_grad_(True)
    assert searching.trainable.new_in(net)[0] == "0.bias"
    assert found_in(searching, net).names == ("0", "4", "7")


def test_too_few_of_which_all_learn_end_nothing(told):
    searching = search(told)
    assert found_in(searching, nn.Sequential(nn.Linear(4, 2))) is None
    assert not searching.is_looking
    (text,) = told.warnings
    assert "expected at least 2" in text
    assert text.endswith("Training continues as without the callback")


def test_too_few_that_the_user_named_are_an_error(told):
    searching = search(told, ["0"])
    with pytest.raises(TooFewLayersError, match="expected at least 2"):
        found_in(searching, nn.Sequential(nn.Linear(4, 2)))
    assert not searching.is_looking


def test_notes_of_the_chain_are_told(told):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = deep_mlp()

        def forward(self, x):
            return nn.functional.linear(self.net(x) @ self.net[9].weight, self.net[0].weight.T)

    chain = found_in(search(told), Tied())
    assert chain.notes
    assert told.warnings == list(chain.notes)


def test_a_step_that_breaks_off_leaves_the_modules(told):
    net = deep_mlp()
    before = attributes(net)
    searching = search(told)
    searching.start(net)
    assert searching.is_looking
    assert searching.stop()
    assert not searching.stop()
    assert not searching.is_looking
    assert_same_attributes(before, net)


class TestRestored:
    @pytest.fixture
    def chain(self, told):
        return found_in(search(told), deep_mlp())

    @pytest.mark.parametrize("asked", [None, ["0", "4", "7"], ["4", "7"]])
    def test_what_was_asked_for_then_may_be_asked_for_again(self, told, chain, asked):
        search(told, asked).check_restored(chain, asked)

    def test_what_was_found_then_may_be_named_now(self, told, chain):
        search(told, list(chain.names)).check_restored(chain, None)

    def test_anything_else_is_refused(self, told, chain):
        with pytest.raises(CheckpointError, match=r"this callback has layer_modules=\['0', '7'\]"):
            search(told, ["0", "7"]).check_restored(chain, None)
