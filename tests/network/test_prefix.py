"""What a frozen prefix does, held against autograd itself and hand-written freezing."""

import copy
import itertools
import json
import pickle

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.prefix import SETTLING_STEPS, FrozenPrefix
from lightning_egeria.errors import LayerChainError
from support.networks import (
    EVERY_GRADIENT,
    MODELS,
    Encoder,
    OutOfOrder,
    assert_same_gradients,
    deep_mlp,
    depths_of,
    gradients,
    ids,
    leaves_of,
    loss_of,
    outputs_of,
    prefixes_by_autograd,
    step,
    traced,
    trainable,
)
from support.repeated_calls import RandomCalls


@pytest.mark.parametrize("name", MODELS)
def test_no_backward_work_is_left_for_a_frozen_prefix(name):
    net, inputs, chain = traced(name)
    prefix = FrozenPrefix(net, chain)
    named = dict(net.named_parameters())
    leaves, size = leaves_of(step(net, inputs))
    for depth in depths_of(chain, chain.max_depth):
        prefix.set_depth(depth)
        boundaries = [layer_module.boundary for layer_module in chain.layer_modules[:depth]]
        seen, loss = outputs_of(net, boundaries, lambda: step(net, inputs))
        for boundary, calls in seen.items():
            assert calls
            for leaf in itertools.chain.from_iterable(calls):
                assert leaf.grad_fn is None, f"{boundary} at depth {depth}"
                assert not leaf.requires_grad, f"{boundary} at depth {depth}"
        frozen = {named[parameter] for parameter in chain.prefix_parameters(depth)}
        active, smaller = leaves_of(loss)
        assert active == leaves - frozen, f"depth {depth}"
        assert smaller < size, f"depth {depth}"
        size = smaller


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60, 600))])
def test_modules_that_are_called_several_times(seed):
    torch.manual_seed(seed)
    net, inputs = RandomCalls(seed), (torch.rand(6, 4), torch.rand(6, 4))
    try:
        chain = LayerChain.trace(net, lambda: step(net, inputs))
    except LayerChainError:  # too few layer modules
        return
    assert all(layer_module.parameters for layer_module in chain.layer_modules)
    named, prefix = dict(net.named_parameters()), FrozenPrefix(net, chain)
    leaves, size = leaves_of(step(net, inputs))
    before = copy.deepcopy(net.state_dict())
    for depth in range(1, chain.max_depth + 1):
        net.load_state_dict(before)
        net.zero_grad()
        prefix.set_depth(depth)
        frozen = set(chain.prefix_parameters(depth))
        by_hand = copy.deepcopy(net)
        for name, parameter in by_hand.named_parameters():
            parameter.requires_grad_(name not in frozen)
        loss = step(net, inputs)
        active, smaller = leaves_of(loss)
        assert active == leaves - {named[name] for name in frozen}
        ran = not chain.layer_modules[depth - 1].left_out  # else it costs nothing, frozen or not
        assert smaller < size or not ran, "some backward work is left for the prefix"
        size = smaller
        loss.backward()
        step(by_hand, inputs).backward()
        assert_same_gradients(gradients(net), gradients(by_hand))
        for path in chain.members(depth):
            own = net.get_submodule(path).named_parameters(recurse=False)
            assert not any(parameter.grad is not None for _, parameter in own), path


@pytest.mark.parametrize("name", EVERY_GRADIENT)
def test_gradients_are_those_of_freezing_by_hand(name):
    net, inputs, chain = traced(name)
    prefixes, _ = prefixes_by_autograd(net, inputs, chain, range(1, len(chain)))
    users = {parameter for parameter, p in net.named_parameters() if not p.requires_grad}
    before = {key: value.clone() for key, value in net.state_dict().items()}
    prefix = FrozenPrefix(net, chain)
    for depth in [*range(chain.max_depth + 1), 0]:
        net.load_state_dict(before)
        net.zero_grad()
        prefix.set_depth(depth)
        by_hand = copy.deepcopy(net)
        for parameter in by_hand.parameters():
            parameter.requires_grad_(True)
        step(net, inputs).backward()
        frozen = prefixes.get(depth, set())
        for parameter_name, parameter in by_hand.named_parameters():
            parameter.requires_grad_(parameter_name not in frozen | users)
        step(by_hand, inputs).backward()
        assert_same_gradients(gradients(net), gradients(by_hand))
        assert all(net.get_parameter(parameter).grad is None for parameter in frozen)
        for (key, value), other in zip(net.state_dict().items(), by_hand.state_dict().values(), strict=True):
            assert torch.equal(value, other), key


@pytest.mark.parametrize("name", [*EVERY_GRADIENT, "densenet121", "mobilenet_v2", "timm levit"])
def test_unfreezing_gives_back_what_was_there(name):
    net, inputs, chain = traced(name)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    modes = {path: module.training for path, module in net.named_modules()}
    grads = trainable(net)
    step(net, inputs).backward()
    expected = gradients(net)
    net.load_state_dict(before)
    prefix = FrozenPrefix(net, chain)
    for depth in (1, chain.max_depth, 0):
        prefix.set_depth(depth)
    assert trainable(net) == grads
    assert {path: module.training for path, module in net.named_modules()} == modes
    net.zero_grad()
    step(net, inputs).backward()
    assert_same_gradients(gradients(net), expected)


class TestFrozenPrefix:
    @pytest.fixture
    def net(self):
        return deep_mlp()

    @pytest.fixture
    def prefix(self, net):
        return FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))

    def train(self, net, optimizer, steps=3):
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(net(torch.rand(5, 4))).backward()
            optimizer.step()

    def test_starts_with_nothing_frozen(self, net, prefix):
        assert (prefix.depth, prefix.version) == (0, 0)
        assert all(parameter.requires_grad for parameter in net.parameters())

    @pytest.mark.parametrize("depth", [-1, 3, 100])
    def test_depth_out_of_range(self, net, prefix, depth):
        with pytest.raises(ValueError, match=rf"depth must be in 0\.\.2, got {depth}"):
            prefix.set_depth(depth)
        assert (prefix.depth, prefix.version) == (0, 0)
        assert all(parameter.requires_grad for parameter in net.parameters())

    def test_the_version_rises_with_each_change_and_only_then(self, prefix):
        versions = []
        for depth in (0, 1, 1, 2, 1, 0, 0, 2):
            prefix.set_depth(depth)
            versions.append(prefix.version)
        assert versions == [0, 1, 1, 2, 3, 4, 4, 5]

    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
            lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
        ],
        ids=["sgd", "sgd foreach", "adam", "adamw", "rmsprop"],
    )
    def test_momentum_and_decay_leave_the_prefix_alone(self, net, prefix, make):
        optimizer = make(net.parameters())
        self.train(net, optimizer)
        prefix.set_depth(2)
        frozen = {name: net.get_parameter(name) for name in prefix.chain.prefix_parameters(2)}
        before = {key: value.clone() for key, value in net.state_dict().items()}
        state = copy.deepcopy({name: optimizer.state[p] for name, p in frozen.items()})
        self.train(net, optimizer)
        after = {key: value.clone() for key, value in net.state_dict().items()}
        for key in before:
            same = torch.equal(before[key], after[key])
            assert same == (key.split(".")[0] in "01245"), key
        for name, p in frozen.items():
            assert p.grad is None
            for key, value in state[name].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[p][key])), (name, key)
        prefix.set_depth(0)
        self.train(net, optimizer)
        assert not any(torch.equal(after[name], p) for name, p in frozen.items())

    def test_gradients_are_dropped_for_the_prefix_only(self, net, prefix):
        loss_of(net(torch.rand(5, 4))).backward()
        prefix.set_depth(1)
        assert {name for name, p in net.named_parameters() if p.grad is None} == set(prefix.chain.prefix_parameters(1))

    def test_only_batch_norm_of_the_prefix_stands_still(self, net, prefix):
        prefix.set_depth(1)
        before = {key: value.clone() for key, value in net.named_buffers()}
        loss_of(net(torch.rand(5, 4)))
        moved = {key for key, value in net.named_buffers() if not torch.equal(value, before[key])}
        assert moved == {"5.running_mean", "5.running_var", "5.num_batches_tracked"}

    def test_somebody_who_calls_train_does_not_reach_the_prefix(self, net, prefix):
        modes = [False] * 4 + [True] * 6
        prefix.set_depth(1)
        assert net.train() is net
        assert net[1].train() is net[1]
        assert [part.training for part in net] == modes
        other = pickle.loads(pickle.dumps(copy.deepcopy(net)))
        prefix.set_depth(0)
        assert all(part.training for part in net)
        assert not any("train" in vars(part) for part in net)
        assert [part.training for part in other] == modes
        assert all(part.training for part in other.train())

    def test_modes_come_back_after_somebody_changed_them_past_train(self, net, prefix):
        prefix.set_depth(1)
        net[1].training = True
        prefix.assert_modes()
        assert [part.training for part in net] == [False] * 4 + [True] * 6
        prefix.set_depth(0)
        assert all(part.training for part in net)

    def test_the_prefix_gives_the_same_output_every_time(self, net, prefix):
        x = torch.rand(5, 4)
        assert not torch.equal(net[:7](x), net[:7](x))
        prefix.set_depth(2)
        assert torch.equal(net[:7](x), net[:7](x))

    def test_what_changes_in_training_is_at_rest(self):
        class Counts(nn.Module):
            """Changes what a part of it holds."""

            def __init__(self):
                super().__init__()
                self.part, self.dropout = nn.BatchNorm1d(4, momentum=0.0), nn.Dropout(0.5)

            def forward(self, x):
                if self.training:
                    self.part.running_mean += 1
                return self.dropout(x)

        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        net = nn.Sequential(spectral, Counts(), nn.LSTM(4, 4, 2, dropout=0.5), nn.Identity(), *deep_mlp()[:4])
        net[3].forward = lambda output: output[0]
        net = nn.Sequential(*net, nn.Linear(6, 6), nn.Linear(6, 2))
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(prefix.chain.max_depth)
        before = copy.deepcopy(net.state_dict())
        assert torch.equal(*(net[:8](torch.ones(5, 4)) for _ in range(2)))
        assert all(map(torch.equal, before.values(), net.state_dict().values()))
        assert {path for path, part in net.named_modules() if part.training and "." not in path} == {"", "8", "9"}

    @staticmethod
    def one_step(prefix, forward=lambda: None):
        prefix.batch_start()
        forward()
        prefix.batch_end()
        settled = prefix.count_step()
        if settled:
            prefix.settle()
        return settled

    @pytest.mark.parametrize("momentum", [0.01, None])
    def test_slow_statistics_settle_before_they_are_at_rest(self, net, momentum):
        net[1].momentum = momentum
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(1)
        generator = torch.Generator().manual_seed(0)

        def forward():
            assert net[1].momentum == 0.1
            net[:2](3 + torch.rand(50, 4, generator=generator))

        for number in range(SETTLING_STEPS):
            net.train()
            assert (prefix.depth, prefix.settled_depth, prefix.version) == (1, 0, 1)
            assert (net[1].training, net[1].momentum) == (True, momentum)
            assert self.one_step(prefix, forward) == (number == SETTLING_STEPS - 1)
        assert (prefix.settled_depth, prefix.version, net[1].training, net[1].momentum) == (1, 2, False, momentum)
        expected = net[0](3 + torch.rand(5000, 4, generator=generator)).mean(0)
        torch.testing.assert_close(net[1].running_mean, expected.detach(), rtol=0.05, atol=0.05)
        assert not self.one_step(prefix)
        prefix.set_depth(0)
        assert (prefix.settled_depth, net[1].training, net[1].momentum) == (0, True, momentum)

    def test_each_module_settles_in_its_own_time(self, net):
        net[1].momentum = net[5].momentum = 0.01
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(1)
        for _ in range(SETTLING_STEPS - 10):
            self.one_step(prefix)
        prefix.set_depth(2)
        assert [self.one_step(prefix) for _ in range(10)] == [False] * 9 + [True]
        assert (prefix.settled_depth, net[1].training, net[5].training) == (1, False, True)
        assert [self.one_step(prefix) for _ in range(30)] == [False] * 29 + [True]
        assert (prefix.settled_depth, net[5].training) == (2, False)

    def test_what_is_shallower_stays_settled(self, net):
        net[5].momentum = 0.01
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(2)
        assert (prefix.settled_depth, net[1].training, net[5].training) == (1, False, True)
        prefix.batch_start()
        prefix.set_depth(1)  # an error in the middle of a step, say
        assert (prefix.settled_depth, net[1].training, net[5].training, net[5].momentum) == (1, False, True, 0.01)

    def test_a_momentum_that_the_user_sets_meanwhile_counts(self, net):
        net[1].momentum = 0.05
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(1)
        self.one_step(prefix)
        net[1].momentum = 0.005
        self.one_step(prefix, lambda: setattr(net[1], "momentum", 0.004))
        assert net[1].momentum == 0.004
        prefix.set_depth(0)
        assert net[1].momentum == 0.004

    @pytest.mark.parametrize("momentum", [0.1, 0.5, 0.0])
    def test_other_statistics_are_at_rest_at_once(self, net, momentum):
        net[1].momentum = momentum
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(1)
        assert (prefix.settled_depth, net[1].training, net[1].momentum) == (1, False, momentum)

    def test_settling_goes_on_from_a_checkpoint(self, net):
        net[1].momentum = net[5].momentum = 0.01
        chain = LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),)))
        other = copy.deepcopy(net)
        prefix, resumed = FrozenPrefix(net, chain), FrozenPrefix(other, chain)
        for depth in (1, 2):
            prefix.set_depth(depth)
            for _ in range(SETTLING_STEPS - 10 * (depth == 2)):
                self.one_step(prefix)
        resumed.load_state_dict(json.loads(json.dumps(prefix.state_dict())))
        for _ in range(9):
            assert not self.one_step(resumed)
            assert (resumed.depth, resumed.settled_depth, other[1].training, other[5].training) == (2, 1, False, True)
        assert self.one_step(resumed)
        assert (resumed.settled_depth, other[5].training, other[5].momentum) == (2, False, 0.01)

    def test_what_the_user_froze_stays_frozen(self, net):
        net[1].bias.requires_grad_(False)
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        net[0].bias.requires_grad_(False)  # after the trace
        for depth in (1, 2, 0):
            prefix.set_depth(depth)
        assert {name for name, p in net.named_parameters() if not p.requires_grad} == {"0.bias", "1.bias"}

    def test_what_the_user_put_in_evaluation_mode_stays_there(self, net, prefix):
        net[1].eval()
        for depth in (1, 2):
            prefix.set_depth(depth)
            prefix.assert_modes()
        prefix.set_depth(0)
        assert [index for index, part in enumerate(net) if not part.training] == [1]

    def test_the_container_and_the_back_keep_training(self, net, prefix):
        prefix.set_depth(2)
        assert net.training
        assert [part.training for part in net] == [False] * 7 + [True] * 3

    def test_a_part_that_is_shared_with_the_back_keeps_training(self):
        net = OutOfOrder()
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(1)
        assert not net.norm.training
        assert net.drop.training
        assert net.act.training

    def test_padded_batches_through_a_partly_frozen_encoder(self):
        net = Encoder()
        x = ids(3, 6)
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (x,))))
        prefix.set_depth(2)
        parts = dict(net.encoder.layers[0].named_modules())
        assert not any(parts[name].training for name in ("self_attn", "dropout", "dropout1", "dropout2"))
        step(net, (x,)).backward()
        assert net.encoder.layers[0].linear1.weight.grad is None
        assert net.encoder.layers[1].linear1.weight.grad is not None

    def test_depth_may_go_up_and_down(self, net, prefix):
        for depth in (2, 1, 2, 0, 1):
            prefix.set_depth(depth)
            frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
            assert frozen == set(prefix.chain.prefix_parameters(depth))
