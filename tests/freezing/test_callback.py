"""The callback under a real Trainer: what must hold before, at and after a freeze."""

import copy
import json
import math
import warnings

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, ScriptedPolicy, SlopePolicy
from lightning_egeria.errors import (
    ArgumentError,
    CheckpointError,
    LayerChainError,
)


class Net(nn.Module):
    """Convolutions with batch normalisation and dropout in front, so that modes and random state matter."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.deep = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4 * 2 * 2, 3)

    def forward(self, images):
        return self.head(self.deep(self.middle(self.stem(images))).flatten(1))


class Module(L.LightningModule):
    def __init__(self, net=None, optimizer="sgd"):
        super().__init__()
        self.some_name = net or Net()
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.some_name(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val/loss", nn.functional.cross_entropy(self.some_name(images), labels))

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


def loader(samples=40, batch_size=8):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 1, 8, 8, generator=generator)
    return DataLoader(TensorDataset(images, torch.arange(samples) % 3), batch_size=batch_size)


def fit(module, *callbacks, epochs=4, data=None, ckpt_path=None, **arguments):
    arguments = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, **arguments}
    arguments.setdefault("enable_checkpointing", False)
    trainer = L.Trainer(
        max_epochs=epochs, callbacks=list(callbacks), enable_model_summary=False, num_sanity_val_steps=0, **arguments
    )
    L.seed_everything(3, verbose=False)
    trainer.fit(module, loader() if data is None else data, loader(16), ckpt_path=ckpt_path)
    return trainer


def module(**arguments):
    torch.manual_seed(0)
    return Module(**arguments)


class At(L.Callback):
    """Call `look(trainer, module)` after one optimizer step."""

    def __init__(self, step, look):
        self.step, self.look = step, look

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            self.look(trainer, pl_module)


class HandWritten(L.Callback):
    """What a careful user would write to freeze stem and middle of `Net` after one step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step >= self.step:
            for part in (pl_module.some_name.stem, pl_module.some_name.middle):
                part.requires_grad_(False).zero_grad(set_to_none=True)
                for norm in (module for module in part.modules() if isinstance(module, nn.BatchNorm2d)):
                    norm.eval()


def freezing(policy=None, workers=0, **arguments):
    return KnowledgeGuidedFreezing(policy, workers=workers, **arguments)


def states_equal(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Observing(SlopePolicy):
    """Sees everything and decides nothing."""

    seen = ()

    def observe(self, step, plasticity, learning_rate, loss):
        super().observe(step, plasticity, learning_rate, loss)
        if plasticity is not None:
            self.seen = (*self.seen, tuple(plasticity))


@pytest.mark.parametrize(("optimizer", "evaluations", "told"), [("adamw", 0, 1), ("sgd", 9, 0)])
def test_a_learning_rate_that_never_falls_is_told(optimizer, evaluations, told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = freezing(FreezingPolicy(1e-9), evaluate_every_n_steps=1)
        fit(module(optimizer=optimizer), callback)
    texts = [str(warning.message) for warning in caught if "the learning rate has fallen" in str(warning.message)]
    assert len(texts) == told
    assert all("nothing froze: the learning rate is 1.0e-02, and was 1.0e-02 at most" in text for text in texts)
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
    assert states_equal(plain, watched)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_frozen_run_is_the_hand_written_one_bit_for_bit(optimizer):
    by_hand, by_callback, plain = (module(optimizer=optimizer) for _ in range(3))
    fit(by_hand, HandWritten(7))
    fit(by_callback, freezing(ScriptedPolicy({7: 2})))
    fit(plain)

    assert states_equal(by_hand, by_callback)
    assert not states_equal(plain, by_callback)


def test_after_a_freeze_the_prefix_has_no_gradient_and_moves_no_more():
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
    fit(module(), freezing(ScriptedPolicy({6: 2})), At(6, before), At(14, after))

    assert seen["looked"]


def test_unfreezing_lets_everything_learn_again_and_fit_leaves_the_model_trainable():
    seen = {}
    net = module()
    net.some_name.head.bias.requires_grad_(False)
    callback = freezing(ScriptedPolicy({3: 2, 8: 0, 12: 1}))
    fit(
        net,
        callback,
        At(8, lambda _, m: seen.update(weight=m.some_name.stem[0].weight.clone())),
        At(12, lambda _, m: seen.update(after=m.some_name.stem[0].weight.clone())),
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
        (FreezingPolicy(tolerance=1.0), "for 4 evaluations in a row"),
        (FreezingPolicy(1e-12, pretrained=True, peer_tolerance=0.9), "where it is largest"),
        (SlopePolicy(0.9, window_evaluations=2, patience=1, bootstrap=False), "slope"),
    ],
    ids=["rest", "pretrained", "slope"],
)
def test_the_policy_decides_by_itself(policy, reason):
    callback = freezing(policy, evaluate_every_n_steps=1)
    fit(module(), callback, epochs=8)

    assert callback.frozen_depth >= 1
    assert reason in callback.events[0].reason


def test_layer_modules_and_depth_are_known_once_fitting_has_begun():
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


def test_the_evaluation_interval_follows_from_the_length_of_the_run():
    every = {}
    for epochs in (2, 100):
        callback = freezing(Observing(bootstrap=False))
        net = module()
        fit(net, callback, At(2, lambda trainer, _: setattr(trainer, "should_stop", True)), epochs=epochs)
        every[epochs] = callback._every
    assert every == {2: 8, 100: 10}  # 5 steps an epoch: 10 and 500 steps in all, 50 evaluations


def test_plasticity_is_zero_for_a_model_that_does_not_move():
    class Still(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    callback = freezing(Observing(bootstrap=False), evaluate_every_n_steps=1)
    fit(Still(net), callback)
    seen = callback._engine.policy.seen
    assert len(seen) > 3
    assert all(value < 1e-12 for values in seen for value in values)


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated"
)  # pytest.warns emits Lightning's again under its own name
def test_a_reference_that_fails_is_said_once_and_training_goes_on():
    class Odd(Net):
        def forward(self, images):
            if not self.head.weight.requires_grad:  # as it is in the reference
                raise RuntimeError("only for training")
            return super().forward(images)

    callback = freezing(FreezingPolicy(1e-9, pretrained=True, peer_tolerance=0), evaluate_every_n_steps=1)
    with pytest.warns(UserWarning, match=r"reference model failed.*only for training") as told:
        fit(module(net=Odd()), callback)
    told = [str(warning.message) for warning in told if "reference model" in str(warning.message)]
    assert ["3 times in a row" in text for text in told] == [False, True]
    assert callback.frozen_depth == 0


def test_inputs_as_a_dict_several_arguments_and_a_network_called_in_parts():
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


@pytest.mark.parametrize("depth_at_save", [0, 2])
def test_resumes_where_the_checkpoint_was_taken(tmp_path, depth_at_save):
    script = {6: 2, 17: 1} if depth_at_save else {13: 2, 17: 1}
    whole, parts = module(), module()
    fit(whole, freezing(ScriptedPolicy(script)))
    path = tmp_path / "half.ckpt"
    fit(
        parts,
        freezing(ScriptedPolicy(script)),
        At(10, lambda trainer, _: trainer.save_checkpoint(path)),
        epochs=2,
    )
    assert torch.load(path, weights_only=True)["global_step"] == 10

    resumed = module()
    callback = freezing(ScriptedPolicy(script))
    seen = {}
    fit(resumed, callback, At(11, lambda _, __: seen.update(depth=callback._engine.prefix.depth)), ckpt_path=path)

    assert seen["depth"] == depth_at_save
    assert [event.depth for event in callback.events] == [2, 1]
    for name, value in whole.state_dict().items():
        # Dropout draws other numbers after a restart, with and without the callback; what is frozen is exact.
        if depth_at_save and ".stem." in name:
            assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_state_is_plain_and_another_version_is_refused(tmp_path):
    callback = freezing(ScriptedPolicy({2: 1}))
    fit(module(), callback, epochs=1)
    state = json.loads(json.dumps(callback.state_dict()))
    with pytest.raises(CheckpointError, match="version 99"):
        freezing().load_state_dict({**state, "version": 99})

    other = freezing()
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="ScriptedPolicy"):
        fit(module(), other, epochs=1)


def test_a_run_that_was_over_keeps_what_it_was_when_it_is_resumed(tmp_path):
    """Nothing is trained, so nothing is frozen again; what is saved then is what was loaded."""

    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    first, again = freezing(ScriptedPolicy({2: 1})), freezing(ScriptedPolicy({2: 1}))
    fit(module(), first, Saves())
    trainer = fit(module(), again, ckpt_path=tmp_path / "last.ckpt")
    assert again.events == first.events != []
    assert again.frozen_depth == 1
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    states = [torch.load(tmp_path / name, weights_only=True)["callbacks"] for name in ("last.ckpt", "again.ckpt")]
    assert states[0] == states[1]


def test_a_checkpoint_of_another_network_is_refused():
    callback = freezing(ScriptedPolicy({2: 1}))
    fit(module(), callback, epochs=1)
    state = callback.state_dict()
    other = freezing(ScriptedPolicy({2: 1}))
    other.load_state_dict(state)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    with pytest.raises(CheckpointError, match=r"some_name\.stem"):
        fit(module(net=net), other, epochs=1)


def resumed(policy, **arguments):
    """A callback that goes on after another froze two of the three layer modules of `Net`."""
    first = freezing(copy.deepcopy(policy), evaluate_every_n_steps=2, deterministic=True)
    fit(module(), first, epochs=1)
    assert (first.frozen_depth, len(first.layer_modules)) == (2, 3)
    callback = freezing(policy, evaluate_every_n_steps=2, deterministic=True, **arguments)
    callback.load_state_dict(copy.deepcopy(first.state_dict()))
    return callback


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_is_at_rest_was_so_against_one_reference(tmp_path, deterministic):
    policy = FreezingPolicy(tolerance=1e9, patience=4, pretrained=True, peer_tolerance=0)
    whole, first, again = (freezing(policy, evaluate_every_n_steps=2, deterministic=deterministic) for _ in range(3))
    fit(module(), whole)
    fit(module(), first, epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    at_rest = first.state_dict()["policy"]["at_rest"][0]
    assert 0 < at_rest < 4
    fit(module(), again, ckpt_path=tmp_path / "one.ckpt")
    late = 0 if deterministic else 2 * at_rest  # without the weights of the reference, another one begins
    assert again.events[0].step == whole.events[0].step + late


class Anything(FreezingPolicy):
    def __init__(self):
        super().__init__(tolerance=1e9, patience=1, pretrained=True, peer_tolerance=0)


@pytest.mark.parametrize("policy", [Anything(), ScriptedPolicy({4: 2})])
@pytest.mark.parametrize(
    ("arguments", "depth"),
    [
        ({"max_frozen_fraction": 0.4}, 1),
        ({"freeze_until": "some_name.stem"}, 1),
        ({"never_freeze": ["some_name.stem"]}, 0),
        ({"never_freeze": ["some_name.deep"]}, 2),
    ],
)
def test_a_resumed_run_has_its_own_limits(policy, arguments, depth):
    if isinstance(policy, ScriptedPolicy) and depth < 2:
        with pytest.raises(ArgumentError, match=f"this model allows {depth} at most"):
            fit(module(), resumed(policy, **arguments), epochs=1)
        return
    callback, net = resumed(policy, **arguments), module()
    fit(net, callback, epochs=1)
    expected = [2] if depth == 2 else [2, depth]
    assert [event.depth for event in callback.events] == expected
    again = freezing(policy, evaluate_every_n_steps=2, deterministic=True, **arguments)
    again.load_state_dict(copy.deepcopy(callback.state_dict()))
    fit(net, again, epochs=1)
    assert [event.depth for event in again.events] == expected


def test_a_resumed_run_refuses_unknown_names_and_other_layer_modules():
    for argument in ({"never_freeze": ["some_name.neck"]}, {"freeze_until": "some_name.neck"}):
        with pytest.raises(LayerChainError, match=r"'some_name\.neck'; did you mean"):
            fit(module(), resumed(Anything(), **argument), epochs=1)
    with pytest.raises(CheckpointError, match=r"layer_modules asks for \['some_name\.stem', 'some_name\.deep'\]"):
        fit(module(), resumed(Anything(), layer_modules=["some_name.stem", "some_name.deep"]), epochs=1)
    fit(module(), resumed(Anything(), layer_modules=[f"some_name.{name}.0" for name in ("stem", "middle", "deep")]))


def test_a_checkpoint_whose_reference_does_not_fit_leaves_nothing_frozen():
    callback = freezing(ScriptedPolicy({2: 2}))
    fit(module(), callback, epochs=1)
    state = callback.state_dict()
    state["engine"]["reference"] = {}
    other, net = freezing(ScriptedPolicy({2: 2})), module()
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="reference model"):
        fit(net, other, epochs=1)
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert not any("train" in vars(part) for part in net.modules())
    assert all(part.training for part in net.some_name.modules())


def test_a_second_fit_starts_anew():
    net, callback = module(), freezing(ScriptedPolicy({2: 2}))
    first = fit(net, callback, epochs=1)
    fit(net, callback, epochs=1)
    assert [event.step for event in callback.events] == [2]
    assert first.global_step == 5


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
        At(7, lambda _, m: seen.append((m.some_name.stem[1].training, m.some_name.deep[1].training))),
    )
    assert seen == [(False, True)]


def test_an_exception_leaves_the_model_as_it_was():
    class Fails(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.global_step == 4:
                raise RuntimeError("the user's own")
            return loss

    torch.manual_seed(0)
    net = Fails()
    before = {path: set(vars(part)) for path, part in net.named_modules()}
    callback = freezing(ScriptedPolicy({2: 1}), evaluate_every_n_steps=1)
    with pytest.raises(RuntimeError, match="the user's own"):
        fit(net, callback)
    assert all(p.requires_grad for p in net.parameters())
    assert {path: "forward" in vars(part) for path, part in net.named_modules()} == dict.fromkeys(before, False)


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
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")  # pytest.warns gives it out again
@pytest.mark.parametrize("how", [{"data": DataLoader(Empty())}, {"limit_train_batches": 0}])
def test_no_training_batches(how):
    callback = freezing()
    with pytest.warns(UserWarning, match="freezing: there are no training batches"):
        fit(module(), callback, **how)
    assert callback.events == []


def test_too_few_layer_modules():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(LayerChainError, match="at least two layer modules"):
        fit(module(net=net), freezing())


def test_unknown_layer_module():
    with pytest.raises(LayerChainError, match=r"no module 'stem'.*did you mean 'some_name.stem'"):
        fit(module(), freezing(layer_modules=["stem", "some_name.deep"]))


def test_a_script_that_is_deeper_than_the_model():
    with pytest.raises(ArgumentError, match="depth 3, but this model allows 2"):
        fit(module(), freezing(ScriptedPolicy({2: 3})))


def test_the_user_may_know_better():
    callback = freezing(ScriptedPolicy({2: 1}), never_freeze=["some_name.middle"])
    fit(module(), callback, epochs=1)
    assert callback.frozen_depth == 1
    with pytest.raises(ArgumentError, match="depth 2, but this model allows 1"):
        fit(module(), freezing(ScriptedPolicy({2: 2}), freeze_until="some_name.stem"))
    with pytest.raises(LayerChainError, match="freeze_until: no layer module has to do with 'stem'"):
        fit(module(), freezing(freeze_until="stem"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("evaluate_every_n_steps", 0),
        ("refresh_every_n_evaluations", 0),
        ("evaluation_samples", 1),
        ("layer_modules", "layer1"),
        ("never_freeze", "layer1"),
        ("reference_precision", "int4"),
        ("workers", -1),
        ("threads_per_worker", 0),
        ("timeout_s", 0.0),
        ("max_frozen_fraction", 0.0),
        ("max_frozen_fraction", 1.1),
    ],
)
def test_a_wrong_argument_is_named(name, value):
    with pytest.raises(ArgumentError, match=name):
        KnowledgeGuidedFreezing(**{name: value})
