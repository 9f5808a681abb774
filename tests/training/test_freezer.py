"""The mechanism of freezing, whoever decides."""

import dataclasses

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.prefix import SETTLING_STEPS
from lightning_egeria.core.training.freezer import Freezer, FreezingEvent
from support.networks import deep_mlp


@pytest.fixture
def net():
    """Layer modules '0', '4', '7'; head '9'."""
    return deep_mlp()


@pytest.fixture
def chain(net):
    return LayerChain.trace(net, lambda: net(torch.rand(5, 4)).sum())


@pytest.fixture
def freezer(net, chain):
    return Freezer(net, chain)


def frozen(net):
    return [name for name, parameter in net.named_parameters() if not parameter.requires_grad]


def train(net, freezer, steps, lr=0.1):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=0.1)
    for step in range(1, steps + 1):
        freezer.batch_start(None, step - 1)
        optimizer.zero_grad()
        loss = net(torch.rand(5, 4)).square().sum()
        freezer.forward_end(loss)
        loss.backward()
        freezer.backward_end()
        optimizer.step()
        freezer.batch_end()
        freezer.optimizer_step(step)


class TestFreezeTo:
    def test_a_freeze_is_an_event(self, net, chain):
        freezer = Freezer(net, chain, step=7)
        event = freezer.freeze_to(2, "so")
        assert event == FreezingEvent(7, "freeze", 2, "so")
        assert freezer.events == [event]
        assert freezer.depth == 2
        assert set(frozen(net)) == set(chain.prefix_parameters(2))

    def test_the_same_depth_is_none(self, freezer):
        assert freezer.freeze_to(0, "nothing") is None
        freezer.freeze_to(1, "one")
        assert freezer.freeze_to(1, "again") is None
        assert len(freezer.events) == 1

    def test_up_and_down(self, net, freezer):
        kinds = [freezer.freeze_to(depth, "").kind for depth in (2, 1, 2, 0)]
        assert kinds == ["freeze", "unfreeze", "freeze", "unfreeze"]
        assert frozen(net) == []

    @pytest.mark.parametrize("depth", [-1, 3])
    def test_a_depth_out_of_range_changes_nothing(self, net, freezer, depth):
        with pytest.raises(ValueError, match=r"in 0\.\.2"):
            freezer.freeze_to(depth, "too far")
        assert (freezer.events, freezer.depth, frozen(net)) == ([], 0, [])

    def test_events_go_to_the_list_that_is_given(self, net, chain):
        events = [FreezingEvent(1, "freeze", 1, "earlier")]
        freezer = Freezer(net, chain, events=events)
        freezer.freeze_to(1, "now")
        assert len(events) == 2

    def test_buffers_are_shared_before_a_freeze_only(self, net, chain):
        shared = []

        class Ranks:
            several = leads = True

            def share_buffers(self, buffers):
                shared.append((sorted(buffers), len(frozen(net))))

        freezer = Freezer(net, chain, Ranks())
        freezer.freeze_to(1, "")
        freezer.freeze_to(0, "")
        assert shared == [(["1.num_batches_tracked", "1.running_mean", "1.running_var"], 0)]


class TestSteps:
    def test_a_frozen_prefix_stands_still(self, net, chain, freezer):
        freezer.freeze_to(2, "")
        before = {key: value.clone() for key, value in net.state_dict().items()}
        train(net, freezer, 3)
        moved = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
        assert moved == {"7.weight", "7.bias", "9.weight", "9.bias"}

    def test_the_step_follows_training(self, net, freezer):
        train(net, freezer, 3)
        assert freezer.step == 3
        assert freezer.freeze_to(1, "").step == 3

    def test_slow_statistics_settle_after_some_steps(self, net, chain):
        net[1].momentum = 0.01
        freezer = Freezer(net, chain)
        freezer.freeze_to(1, "")
        train(net, freezer, SETTLING_STEPS - 1)
        assert (freezer.prefix.settled_depth, net[1].training) == (0, True)
        version = freezer.prefix.version
        train(net, freezer, 1)
        assert (freezer.prefix.settled_depth, net[1].training) == (1, False)
        assert freezer.prefix.version == version + 1

    def test_a_step_in_which_the_prefix_changed_does_not_count(self, net, chain):
        net[1].momentum = 0.01
        freezer = Freezer(net, chain)
        freezer.batch_start(None, 0)
        freezer.batch_end()
        freezer.freeze_to(1, "")
        freezer.optimizer_step(1)
        train(net, freezer, SETTLING_STEPS - 1)
        assert freezer.prefix.settled_depth == 0
        train(net, freezer, 1)
        assert freezer.prefix.settled_depth == 1

    @pytest.mark.parametrize("end", ["batch_end", "abort"])
    def test_momentum_is_the_user_s_outside_of_batches(self, net, chain, end):
        net[1].momentum = 0.01
        freezer = Freezer(net, chain)
        freezer.freeze_to(1, "")
        freezer.batch_start(None, 0)
        assert net[1].momentum == 0.1
        getattr(freezer, end)()
        assert net[1].momentum == 0.01


class TestRegainedGradient:
    def test_none_while_all_is_well(self, net, freezer):
        freezer.freeze_to(1, "")
        train(net, freezer, 1)
        assert freezer.regained_gradient is None

    def test_a_frozen_parameter_with_a_gradient_is_named(self, net, freezer):
        freezer.freeze_to(1, "")
        net[0].bias.requires_grad_(True)
        train(net, freezer, 1)
        assert freezer.regained_gradient == "0.bias"

    def test_with_several_ranks_the_gradient_is_dropped(self, net, chain):
        class Ranks:
            several = leads = True

            def share_buffers(self, buffers):
                pass

        freezer = Freezer(net, chain, Ranks())
        freezer.freeze_to(1, "")
        net[0].bias.requires_grad_(True)
        before = net[0].bias.detach().clone()
        train(net, freezer, 1)
        assert net[0].bias.grad is None
        assert torch.equal(net[0].bias, before)
        assert freezer.regained_gradient == "0.bias"


class TestClose:
    def test_it_leaves_the_model_as_the_user_made_it(self, net, freezer):
        net[1].eval()
        freezer.freeze_to(2, "")
        freezer.batch_start(None, 0)
        freezer.close()
        freezer.close()
        assert frozen(net) == []
        assert [index for index, part in enumerate(net) if not part.training] == [1]
        assert not any({"train", "forward"} & set(vars(part)) for part in net.modules())


class TestLoadState:
    def test_it_freezes_as_before(self, net, chain, freezer):
        freezer.freeze_to(2, "")
        other = deep_mlp()
        resumed = Freezer(other, chain)
        assert resumed.load_state_dict(freezer.prefix.state_dict()) is None
        assert resumed.depth == 2
        assert frozen(other) == frozen(net)
        assert resumed.events == []

    def test_less_is_an_event_if_less_is_allowed_now(self, chain, freezer):
        freezer.freeze_to(2, "")
        resumed = Freezer(deep_mlp(), dataclasses.replace(chain, max_depth=1), step=12)
        event = resumed.load_state_dict(freezer.prefix.state_dict())
        assert (event.step, event.kind, event.depth) == (12, "unfreeze", 1)
        assert resumed.events == [event]
        assert resumed.depth == 1


def test_an_event_is_described_in_one_line():
    names = ["stem", "layer1", "layer2"]
    freeze = FreezingEvent(120, "freeze", 2, "calm").describe(names)
    assert freeze == "step 120: froze 2 of 3 layer modules, up to 'layer1': calm"
    unfreeze = FreezingEvent(130, "unfreeze", 0, "jump").describe(names)
    assert unfreeze == "step 130: unfroze, 0 of 3 layer modules stay frozen: jump"


def test_a_compiled_network_is_compiled_anew(monkeypatch, net, freezer):
    called = []
    monkeypatch.setattr("lightning_egeria.core.training.freezer.forget_compiled", lambda: called.append(freezer.depth))
    freezer.freeze_to(1, "")
    freezer.freeze_to(0, "")
    assert called == [1, 0]


def test_the_strategy_is_told_the_buffers_that_rest(monkeypatch, net, chain):
    told, strategy = [], nn.Identity()
    monkeypatch.setattr(
        "lightning_egeria.core.training.freezer.rebuild_reducer",
        lambda given, names: told.append((given, sorted(names))),
    )
    net[1].momentum = 0.01
    freezer = Freezer(net, chain, strategy=strategy)
    freezer.freeze_to(2, "")
    assert told == [(strategy, [])]  # the slow statistics of '1' lie in front of those of '5'
    train(net, freezer, SETTLING_STEPS)
    assert told[1][0] is strategy
    assert {name.split(".")[0] for name in told[1][1]} == {"1", "5"}
