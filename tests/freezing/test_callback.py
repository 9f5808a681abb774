"""The callback under a real Trainer: what must hold before, at and after a freeze."""

import copy
import json
import math
import warnings

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, ScriptedPolicy, SlopePolicy
from lightning_egeria.errors import ArgumentError, LayerChainError
from support.freezing.callback_runs import HandWritten, Module, Observing, fit, freezing, module
from support.models import After, ConvNet, equal


@pytest.mark.parametrize(("optimizer", "evaluations", "told"), [("adamw", 0, 1), ("sgd", 9, 0)])
def test_a_learning_rate_that_never_falls_is_told(optimizer, evaluations, told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = freezing(FreezingPolicy(1e-9), evaluate_every_n_steps=1)
        fit(module(optimizer=optimizer), callback)
    texts = [str(warning.message) for warning in caught if "learning rate has dropped" in str(warning.message)]
    assert len(texts) == told
    assert all("nothing froze: the learning rate is 1.0e-02, with a peak of 1.0e-02" in text for text in texts)
    assert callback.events == []
    assert callback.savings().evaluations_done == evaluations  # of 20 steps: from half of the cosine on


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_with_nothing_frozen_training_is_the_same_bit_for_bit(optimizer, accumulate):
    plain, watched = module(optimizer=optimizer), module(optimizer=optimizer)
    fit(plain, accumulate_grad_batches=accumulate)
    callback = freezing(Observing(bootstrap=False), evaluate_every_n_steps=1)
    fit(watched, callback, accumulate_grad_batches=accumulate)

    assert callback.savings().evaluations_done >= 8  # else the test would show nothing
    assert callback.events == []
    assert equal(plain, watched)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_frozen_run_is_the_hand_written_one_bit_for_bit(optimizer):
    by_hand, by_callback, plain = (module(optimizer=optimizer) for _ in range(3))
    fit(by_hand, HandWritten(7))
    fit(by_callback, freezing(ScriptedPolicy({7: 2})))
    fit(plain)

    assert equal(by_hand, by_callback)
    assert not equal(plain, by_callback)


def test_a_frozen_prefix_has_no_gradient_and_stands_still():
    seen = {}

    def before(trainer, pl_module):
        seen["state"] = copy.deepcopy(pl_module.state_dict())
        seen["optimizer"] = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])

    def after(trainer, pl_module):
        net = pl_module.some_name
        prefix = [*net.stem.parameters(), *net.middle.parameters()]
        assert all(p.grad is None and not p.requires_grad for p in prefix)
        assert all(p.grad is not None for p in [*net.deep.parameters(), *net.head.parameters()])
        state, optimizer = pl_module.state_dict(), trainer.optimizers[0].state_dict()["state"]
        moved = {name for name in state if not torch.equal(state[name], seen["state"][name])}
        assert moved == {name for name in state if ".deep." in name or ".head." in name}
        for index in range(len(prefix)):
            assert torch.equal(optimizer[index]["momentum_buffer"], seen["optimizer"][index]["momentum_buffer"])
        seen["looked"] = True

    # The callback stands first: what it froze after step 6 is what `before` sees.
    fit(module(), freezing(ScriptedPolicy({6: 2})), After(before, 6), After(after, 14))

    assert seen["looked"]


def test_after_unfreezing_and_after_fit_everything_learns():
    seen = {}
    net = module()
    net.some_name.head.bias.requires_grad_(False)
    callback = freezing(ScriptedPolicy({3: 2, 8: 0, 12: 1}))
    fit(
        net,
        callback,
        After(lambda _, m: seen.update(weight=m.some_name.stem[0].weight.clone()), 8),
        After(lambda _, m: seen.update(after=m.some_name.stem[0].weight.clone()), 12),
    )

    assert [(event.step, event.kind, event.depth) for event in callback.events] == [
        (3, "freeze", 2),
        (8, "unfreeze", 0),
        (12, "freeze", 1),
    ]
    assert not torch.equal(seen["weight"], seen["after"])
    assert callback.frozen_depth == 1
    assert {name for name, p in net.named_parameters() if not p.requires_grad} == {"some_name.head.bias"}
    assert all(part.training for part in net.modules())


def test_freezing_waits_for_the_end_of_the_accumulation_window():
    steps = []

    class Watch(L.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            frozen = not pl_module.some_name.stem[0].weight.requires_grad
            steps.append((trainer.global_step, frozen))

    fit(module(), freezing(ScriptedPolicy({2: 1})), Watch(), accumulate_grad_batches=3, epochs=2)

    assert steps == [(step, step >= 2) for step in (0, 0, 0, 1, 1, 2, 2, 2, 3, 3)]


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (FreezingPolicy(tolerance=1.0), "for 4 evaluations"),
        (FreezingPolicy(1e-12, pretrained=True, trial=False, peer_tolerance=0.9), "that moves most"),
        (SlopePolicy(0.9, 2, 1, refresh_every_n_evaluations=1, bootstrap=False), "slope"),
    ],
    ids=["rest", "pretrained", "slope"],
)
def test_the_policy_decides_by_itself(policy, reason):
    callback = freezing(policy, evaluate_every_n_steps=1)
    fit(module(), callback, epochs=8)

    assert callback.frozen_depth >= 1
    assert reason in callback.events[0].reason


def test_layer_modules_and_depth_are_known_in_the_fit():
    callback = freezing(ScriptedPolicy({}))
    assert callback.layer_modules == []
    assert callback.frozen_depth == 0
    fit(module(), callback, epochs=1)
    assert callback.layer_modules == ["some_name.stem.0", "some_name.middle.0", "some_name.deep.0"]


def test_named_layer_modules():
    names = ["some_name.middle", "some_name.deep"]
    callback = freezing(ScriptedPolicy({2: 1}), layer_modules=names)
    fit(module(), callback, epochs=1)
    assert callback.layer_modules == names


def test_the_evaluation_interval_follows_the_length_of_the_run():
    every = {}
    for epochs in (2, 100):
        callback = freezing(Observing(bootstrap=False))
        net = module()
        fit(net, callback, After(lambda trainer, _: setattr(trainer, "should_stop", True), 2), epochs=epochs)
        every[epochs] = callback.comparison.evaluate_every_n_steps
    assert every == {2: 8, 100: 10}  # 5 steps an epoch: 10 and 500 steps in all, 50 evaluations


def test_plasticity_is_zero_for_a_model_that_does_not_move():
    class Still(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    callback = freezing(Observing(bootstrap=False), evaluate_every_n_steps=1)
    fit(Still(net), callback)
    seen = callback.active_policy.seen
    assert len(seen) > 3
    assert all(value < 1e-12 for values in seen for value in values)


def test_a_reference_that_fails_is_told_once():
    class Odd(ConvNet):
        def forward(self, images):
            if not self.head.weight.requires_grad:  # as it is in the reference
                raise RuntimeError("only for training")
            return super().forward(images)

    callback = freezing(FreezingPolicy(1e-9, pretrained=True, trial=False, peer_tolerance=0), evaluate_every_n_steps=1)
    with pytest.warns(UserWarning, match=r"reference model failed.*only for training") as told:
        fit(module(net=Odd()), callback)
    told = [str(warning.message) for warning in told if "reference model" in str(warning.message)]
    assert ["3 times in a row" in text for text in told] == [False, True]
    assert callback.frozen_depth == 0


def test_dict_inputs_and_a_network_called_in_parts():
    class Parts(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
            self.decoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

        def training_step(self, batch, batch_idx):
            images, labels = batch
            return nn.functional.cross_entropy(self.decoder(self.encoder(images)), labels)

        def validation_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = freezing(Observing(bootstrap=False), evaluate_every_n_steps=1)
    fit(Parts(), callback)
    assert callback.layer_modules == ["encoder.1", "encoder.3", "decoder.0"]
    assert callback.savings().evaluations_done > 5


def test_inert_in_fast_dev_run():
    callback = freezing(ScriptedPolicy({1: 1}))
    fit(module(), callback, fast_dev_run=2)
    assert callback.layer_modules == []


def test_modes_are_asserted_again_when_the_user_calls_train():
    class Trains(Module):
        def on_train_epoch_start(self):
            self.train()

    seen = []
    torch.manual_seed(0)
    fit(
        Trains(),
        freezing(ScriptedPolicy({2: 1})),
        After(lambda _, m: seen.append((m.some_name.stem[1].training, m.some_name.deep[1].training)), 7),
    )
    assert seen == [(False, True)]


def test_the_table_and_the_numbers(capsys):
    callback = freezing(ScriptedPolicy({8: 2}), evaluate_every_n_steps=1)
    fit(module(), callback, epochs=6)
    printed = capsys.readouterr().out
    savings = callback.savings()

    assert json.loads(json.dumps(savings.to_dict()))["frozen_depth"] == 2
    assert [m.frozen_at_step for m in savings.layer_modules] == [8, 8, None]
    assert savings.step_seconds_before > 0
    assert savings.step_seconds_after > 0
    assert math.isfinite(savings.seconds_saved)
    for word in ("some_name.middle.0", "active", "2/3", "estimated time saved", "val/loss"):
        assert word in printed


def test_shares_of_the_step_are_measured_while_nothing_is_frozen():
    callback = freezing(Observing(bootstrap=False), evaluate_every_n_steps=2)
    fit(module(), callback, epochs=8)
    shares = [m.step_share for m in callback.savings().layer_modules]
    assert all(0 < share < 1 for share in shares)
    assert sum(shares) < 1


class Empty(Dataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError


@pytest.mark.filterwarnings("ignore:Total length of .* across ranks is zero")
@pytest.mark.parametrize("how", [{"data": DataLoader(Empty())}, {"limit_train_batches": 0}])
def test_no_training_batches(how):
    callback = freezing()
    with pytest.warns(UserWarning, match="freezing: there are no training batches"):
        fit(module(), callback, **how)
    assert callback.events == []


def test_too_few_layer_modules_train_as_without():
    def trained(*callbacks):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        fit(module(net=net), *callbacks)
        return net[1].weight

    with pytest.warns(UserWarning, match="expected at least 2.*Training continues as without") as told:
        weight = trained(freezing())
    assert weight.equal(trained())
    assert sum("expected at least 2" in str(one.message) for one in told) == 1


def test_too_few_named_layer_modules():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(LayerChainError, match="expected at least 2"):
        fit(module(net=net), freezing(layer_modules=["some_name.1"]))


def test_unknown_layer_module():
    with pytest.raises(LayerChainError, match=r"no module 'stem'.*Did you mean 'some_name.stem'"):
        fit(module(), freezing(layer_modules=["stem", "some_name.deep"]))


def test_a_script_that_is_deeper_than_the_model():
    with pytest.raises(ArgumentError, match="depth 3, but this model allows at most 2"):
        fit(module(), freezing(ScriptedPolicy({2: 3})))


def test_the_user_may_know_better():
    callback = freezing(ScriptedPolicy({2: 1}), freeze_until="some_name.stem")
    fit(module(), callback, epochs=1)
    assert callback.frozen_depth == 1
    with pytest.raises(ArgumentError, match="depth 2, but this model allows at most 1"):
        fit(module(), freezing(ScriptedPolicy({2: 2}), freeze_until="some_name.stem"))
    with pytest.raises(LayerChainError, match="freeze_until: 'stem' matches no layer module"):
        fit(module(), freezing(freeze_until="stem"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("evaluate_every_n_steps", 0),
        ("evaluation_samples", 1),
        ("layer_modules", "layer1"),
        ("reference_precision", "int4"),
        ("timeout_s", 0.0),
        ("freeze_until", -0.1),
        ("freeze_until", 1.1),
        ("policy", FreezingPolicy),
        ("policy", "FreezingPolicy"),
    ],
)
def test_a_wrong_argument_is_named(name, value):
    with pytest.raises(ArgumentError, match=name):
        KnowledgeGuidedFreezing(**{name: value})
