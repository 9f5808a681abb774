"""Code of users reads ``requires_grad`` as what they have frozen: nothing that has trained is lost."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_egeria import FrozenPrefixCache, StructuredPartialBackprop
from lightning_egeria.errors import CheckpointError
from support.user_programs import Blocks, SavesAt, run, same, scripted, vectors


def trainable(module):
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


class WithTeacher(Blocks):
    """A teacher is large and frozen from the start: it is not to be saved."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__(norm=norm)
        self.strict_loading = False
        self.teacher = nn.Linear(8, 3).requires_grad_(False)

    def training_step(self, batch, _):
        return (self.net(batch[0]) - self.teacher(batch[0])).square().mean()


class InHook(WithTeacher):
    """Public report: Lightning 21053."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trainable(self)}


class InStateDict(WithTeacher):
    def state_dict(self, *args, **kwargs):
        return {k: v for k, v in super().state_dict(*args, **kwargs).items() if k in trainable(self)}


class InCallback(L.Callback):
    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trainable(module)}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("kind", "others"), [(InHook, []), (InStateDict, []), (WithTeacher, [InCallback])])
def test_a_checkpoint_of_what_trains_is_whole(tmp_path, kind, others, cached):
    def fit(module, *callbacks, **arguments):
        data = FrozenPrefixCache(vectors()) if cached else None
        return run(module, scripted({12: 3}), *callbacks, *(other() for other in others), data=data, **arguments)

    whole, part, resumed = kind(), kind(), kind()
    everything = trainable(whole)
    fit(whole)
    saves = ModelCheckpoint(tmp_path, save_last=True)
    fit(part, saves, epochs=2, enable_checkpointing=True)
    weights = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert everything <= weights.keys()
    assert "teacher.weight" not in weights
    fit(resumed, ckpt_path=tmp_path / "last.ckpt")
    assert same(whole, resumed)


@pytest.mark.parametrize("weights_only", [False, True])
def test_so_is_one_at_any_step(tmp_path, weights_only):
    module = InHook()
    everything = trainable(module)
    run(module, scripted({12: 3, 20: 1}), SavesAt(tmp_path, 11, 12, 13, 20, 21, weights_only=weights_only))
    for step in (11, 12, 13, 20, 21):
        weights = torch.load(tmp_path / f"{step}.ckpt", weights_only=False)["state_dict"]
        assert everything == weights.keys() - {"teacher.weight", "teacher.bias"}, step


class Exports(L.LightningModule):
    """Keeps what trains at each moment at which users export."""

    def on_validation_epoch_end(self):
        self.exported["validation"] = trainable(self)

    def on_validation_end(self):
        self.exported["after validation"] = trainable(self)

    def on_train_epoch_end(self):
        self.exported["epoch"] = trainable(self)

    def on_train_end(self):
        self.exported["train end"] = trainable(self)

    def on_fit_end(self):
        self.exported["fit end"] = trainable(self)


class Exporting(Exports, WithTeacher):
    def __init__(self):
        super().__init__()
        self.exported = {}

    def validation_step(self, batch, _):
        self.net(batch[0])


class ExportingCallback(L.Callback):
    """The same in a callback; it stands in front of that which freezes, or behind it."""

    def __init__(self):
        self.exported = {}

    def on_validation_epoch_end(self, trainer, module):
        self.exported.setdefault("validation", []).append(trainable(module))

    def on_train_epoch_end(self, trainer, module):
        self.exported.setdefault("epoch", []).append(trainable(module))

    def on_train_end(self, trainer, module):
        self.exported.setdefault("train end", []).append(trainable(module))


@pytest.mark.parametrize("in_front", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"val_check_interval": 0.5}, {"max_steps": 12}])
def test_so_do_callbacks(in_front, arguments):
    module, freezes, exports = Exporting(), scripted({4: 3}), ExportingCallback()
    everything = trainable(module)
    run(
        module, *((exports, freezes) if in_front else (freezes, exports)), validation=vectors(16), epochs=2, **arguments
    )
    assert [*exports.exported] == ["validation", "epoch", "train end"]
    assert all(names == everything for found in exports.exported.values() for names in found)


@pytest.mark.parametrize("in_front", [False, True])
def test_partial_backprop_beside_it_sees_what_is_frozen(in_front):
    """It reads what trains at the start of each batch, also of the first one behind a validation."""
    made = []
    for callback in (False, True):
        module, freezes = Exporting(), scripted({4: 3})
        partial = StructuredPartialBackprop("temporal", min_share=1.0)
        own = ((partial, freezes) if in_front else (freezes, partial)) if callback else (freezes,)
        run(module, *own, validation=vectors(16), epochs=2, val_check_interval=0.25)
        made.append(module)
    assert same(*made)


def test_exports_and_counts_are_those_of_a_run_without_freezing():
    found = []
    for callbacks in ((), (scripted({4: 3}),)):
        module = Exporting()
        run(module, *callbacks, validation=vectors(16), epochs=2, val_check_interval=0.5)
        found.append({**module.exported, "after fit": trainable(module)})
    assert found[0] == found[1]
    assert len(found[0]) == 6


def test_steps_are_frozen_all_the_same():
    seen = []

    class Watches(L.Callback):
        def on_before_backward(self, trainer, module, loss):
            seen.append(module.net[0][0].weight.requires_grad)

        def on_validation_batch_start(self, trainer, module, *_):
            validated.append(module.net[0][0].weight.requires_grad)

    validated = []
    run(Exporting(), scripted({4: 3}), Watches(), validation=vectors(16), epochs=2, val_check_interval=0.25)
    assert seen == [True] * 4 + [False] * 12
    assert validated == [True, True, *[False] * 14][: len(validated)]


class WithStatistics(InHook):
    """Its own hook leaves statistics out, in a run without freezing too."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d)


def test_a_checkpoint_without_frozen_weights_is_refused(tmp_path):
    run(WithTeacher(), scripted({12: 3}), SavesAt(tmp_path, 14))
    checkpoint = torch.load(tmp_path / "14.ckpt", weights_only=False)
    for name in [name for name in checkpoint["state_dict"] if name.startswith("net.1.")]:
        del checkpoint["state_dict"][name]
    torch.save(checkpoint, tmp_path / "less.ckpt")
    module = WithTeacher()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks 'net\.1\.\d\.\w+' and 3 more, which were frozen"):
        run(module, scripted({12: 3}), ckpt_path=tmp_path / "less.ckpt")
    assert module.state_dict().keys() == before.keys()


def test_one_without_frozen_statistics_is_refused(tmp_path):
    run(WithStatistics(), scripted({12: 3}), SavesAt(tmp_path, 14))
    with pytest.raises(CheckpointError, match=r"lacks 'net\.0\.1\.running_mean' and 8 more, which were frozen"):
        run(WithStatistics(), scripted({12: 3}), ckpt_path=tmp_path / "14.ckpt")


def test_one_that_the_module_completes_is_taken(tmp_path):
    class Completes(WithTeacher):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {**whole["state_dict"], **checkpoint["state_dict"]}

    run(WithTeacher(), scripted({12: 3}), SavesAt(tmp_path, 16))
    whole = torch.load(tmp_path / "16.ckpt", weights_only=False)
    less = {**whole, "state_dict": {k: v for k, v in whole["state_dict"].items() if not k.startswith("net.1.")}}
    torch.save(less, tmp_path / "less.ckpt")
    module, uninterrupted = Completes(), WithTeacher()
    run(module, scripted({12: 3}), ckpt_path=tmp_path / "less.ckpt")
    run(uninterrupted, scripted({12: 3}))
    assert same(module, uninterrupted)


def test_the_trainer_saves_as_before_afterwards():
    trainers = []

    class Keeps(L.Callback):
        def on_fit_end(self, trainer, module):
            trainers.append(trainer)

    run(WithTeacher(), scripted({12: 3}), Keeps())
    assert "save_checkpoint" not in vars(trainers[0])
