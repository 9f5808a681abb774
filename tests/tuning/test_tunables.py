"""Each tunable reads and sets what it names, and says what does not fit."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_egeria import PrefixFreezing
from lightning_egeria.errors import ArgumentError, UnsupportedError
from lightning_egeria.methods.tuning.spaces import Choice, Uniform
from lightning_egeria.methods.tuning.tunables import CustomTunable, Tunables
from support.models import Classifier, ConvNet


def trainer_of(module=None, adam=False, scheduler=None):
    module = module or Classifier()
    optimizer = torch.optim.AdamW(module.parameters()) if adam else module.configure_optimizers()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "weight_decay": 0.5})
    configs = [SimpleNamespace(scheduler=scheduler)] if scheduler is not None else []
    return SimpleNamespace(
        lightning_module=module,
        optimizers=[optimizer],
        lr_scheduler_configs=configs,
        gradient_clip_val=None,
        callbacks=[],
    )


CASES = {
    "lr": (False, 0.05, 0.2, lambda t: t.optimizers[0].param_groups[0]["lr"]),
    "momentum": (False, 0.9, 0.1, lambda t: t.optimizers[0].param_groups[1]["momentum"]),
    "weight_decay": (False, 0.01, 0.0, lambda t: t.optimizers[0].param_groups[1]["weight_decay"]),
    "groups.1.weight_decay": (False, 0.5, 0.25, lambda t: t.optimizers[0].param_groups[1]["weight_decay"]),
    "nesterov": (False, False, True, lambda t: t.optimizers[0].param_groups[0]["nesterov"]),
    "betas.1": (True, 0.999, 0.9, lambda t: t.optimizers[0].param_groups[0]["betas"][1]),
    "dropout": (False, 0.2, 0.4, lambda t: next(m for m in t.lightning_module.modules() if type(m) is nn.Dropout).p),
    "gradient_clip_val": (False, 0.0, 1.5, lambda t: t.gradient_clip_val),
}


@pytest.mark.parametrize("name", CASES)
def test_it_reads_and_sets_what_it_names(name):
    adam, before, after, look = CASES[name]
    trainer, tunables = trainer_of(adam=adam), Tunables({name: Choice([after])})
    tunables.check(trainer)
    assert tunables.get(trainer) == {name: before}
    tunables.set(trainer, {name: after})
    assert tunables.get(trainer) == {name: after}
    assert look(trainer) == after


@pytest.mark.parametrize("names", [("lr", "groups.1.lr"), ("groups.1.lr", "lr")])
def test_an_option_of_one_group_is_set_last(names):
    trainer, tunables = trainer_of(), Tunables({name: Uniform(0.01, 1) for name in names})
    tunables.set(trainer, {"lr": 0.1, "groups.1.lr": 0.4})
    assert tunables.get(trainer) == {"lr": 0.1, "groups.1.lr": 0.4}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"lr": Choice([-0.1])}, "'lr' cannot be -0.1: it is 0.05 now, and takes a positive number"),
        ({"lr": Choice([True])}, "'lr' cannot be True"),
        ({"momentum": Uniform(0.5, 1.5)}, "'momentum' cannot be 1.5.*numbers from 0 to 1"),
        ({"gradient_clip_val": Choice([-1.0])}, "numbers of at least 0"),
        ({"weight_decay": Choice([0.1, "a"])}, "'weight_decay' cannot be 'a'.*values of that kind"),
        ({"nesterov": Choice([1])}, "'nesterov' cannot be 1: it is False now"),
    ],
)
def test_a_value_out_of_range_is_refused(space, message):
    with pytest.raises(UnsupportedError, match=message):
        Tunables(space).check(trainer_of())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rho", "nothing to tune named 'rho'.*The options are"),
        ("betas.7", "nothing to tune named"),
        ("groups.9.lr", "nothing to tune named"),
        ("betas", r"the option 'betas' is \(0.9, 0.999\)"),
        ("frozen_depth", "Add PrefixFreezing"),
    ],
)
def test_what_does_not_fit_is_refused(name, message):
    with pytest.raises(UnsupportedError, match=message):
        Tunables({name: Choice([1])}).check(trainer_of(adam=True))


def test_dropout_clipping_and_cycled_momentum_are_refused():
    with pytest.raises(UnsupportedError, match="no dropout modules"):
        Tunables({"dropout": Choice([0.1])}).check(trainer_of(Classifier(ConvNet(dropout=0))))
    manual = Classifier()
    manual.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="does not clip gradients"):
        Tunables({"gradient_clip_val": Choice([0.1])}).check(trainer_of(manual))
    with pytest.raises(UnsupportedError, match="sets the momentum in each step"):
        Tunables({"momentum": Choice([0.1])}).check(trainer_of(scheduler=SimpleNamespace(cycle_momentum=True)))


def test_a_custom_tunable_is_set_only_where_it_differs():
    calls, box = [], {"value": 1}
    custom = CustomTunable(
        Choice([1, 2]), lambda _: box["value"], lambda _, value: (calls.append(value), box.update(value=value))
    )
    tunables, trainer = Tunables({"mine": custom, "lr": Choice([0.05])}), trainer_of()
    tunables.set(trainer, {"mine": 1, "lr": 0.05})
    tunables.set(trainer, {"mine": 2, "lr": 0.05})
    assert calls == [2]
    trainer.optimizers[0].param_groups[0]["lr"] = 0.7
    box["value"] = 1
    tunables.set_outside_checkpoints(trainer, {"mine": 2, "lr": 0.05})  # the rate is in the checkpoint
    assert (box["value"], trainer.optimizers[0].param_groups[0]["lr"]) == (2, 0.7)
    for wrong in (None, math.nan):
        box["value"] = wrong
        with pytest.raises(UnsupportedError, match=f"returned {wrong}, expected a number"):
            tunables.check(trainer)


@pytest.mark.parametrize("space", [Uniform(0, 2.9), Choice([True, False]), Choice([-1, 0]), Choice([0.5, 1])])
def test_depths_are_whole_numbers(space):
    trainer = trainer_of()
    trainer.callbacks = [PrefixFreezing()]
    with pytest.raises(UnsupportedError, match=r"takes a Choice of whole numbers\. Change its values"):
        Tunables({"frozen_depth": space}).check(trainer)


@pytest.mark.parametrize("arguments", [([1, 2], len, len), (Choice([1, 2]), None, len), (Choice([1, 2]), len, None)])
def test_a_custom_tunable_needs_a_space_and_two_functions(arguments):
    with pytest.raises(ArgumentError, match="CustomTunable needs a Choice"):
        CustomTunable(*arguments)


@pytest.mark.parametrize("tunables", [["lr"], {}, None])
def test_tunables_are_a_mapping(tunables):
    with pytest.raises(ArgumentError, match="tunables must name at least one thing"):
        Tunables(tunables)


@pytest.mark.parametrize("names", [("lr", "groups.0.lr"), ("momentum", "betas.0"), ("betas.0", "groups.0.betas.0")])
def test_two_tunables_of_one_value_are_refused(names):
    with pytest.raises(ArgumentError, match=f"'{names[0]}' and '{names[1]}' set the same value"):
        Tunables(dict.fromkeys(names, Choice([0.1, 0.2])))
    Tunables({names[0]: Choice([0.1, 0.2]), "groups.1.lr": Choice([0.1])})
