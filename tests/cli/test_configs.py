"""Every option of every config group can be instantiated, and none of them says something else than the code."""

import copy
import inspect
import re
from types import SimpleNamespace

import hydra
import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from torch import nn

from lightning_egeria import AdaptiveBatchSize, FrozenPrefixCache, SelectiveBackprop
from lightning_egeria.cli.configuration import CONFIG_DIR, check
from lightning_egeria.cli.methods import CONFIGURABLE, WRAPPERS
from lightning_egeria.cli.train import data_of
from lightning_egeria.demos.data import Cifar10Data, DigitsData
from lightning_egeria.demos.resnet import CifarResNet
from lightning_egeria.demos.schedules import ScheduledModule

GROUPS = (
    *("model", "optimizer", "scheduler", "data", "callbacks", *WRAPPERS),
    *("trainer", "logger"),
    *("experiment", "hparams_search", "debug"),
)
PACKAGES = {
    ("logger", "tensorboard"): "tensorboard",
    ("hparams_search", "tolerance"): "hydra_plugins.hydra_optuna_sweeper",
}
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONFIG_DIR / group).glob("*.yaml"))]


@pytest.fixture
def configure(tmp_path):
    def composed(*overrides):
        return compose("train", overrides=[f"run_dir={tmp_path}", *overrides])

    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        yield composed
    GlobalHydra.instance().clear()


def test_every_folder_of_the_configuration_is_tested_here():
    assert {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()} == set(GROUPS)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_instantiates(configure, group, option):
    if (group, option) in PACKAGES:
        pytest.importorskip(PACKAGES[group, option], reason="an extra of this option")
    config = configure(f"{group}={option}")
    check(config)  # it finds no mistake

    model = hydra.utils.instantiate(config.model)
    datamodule = data_of(config)
    callbacks = [hydra.utils.instantiate(callback) for callback in config.get("callbacks", {}).values()]
    logger = hydra.utils.instantiate(config.logger) if config.get("logger") else False
    trainer = hydra.utils.instantiate(config.trainer, callbacks=callbacks, logger=logger)

    assert isinstance(model, ScheduledModule)
    assert isinstance(model.net, nn.Module)
    assert isinstance(datamodule, L.LightningDataModule)
    assert isinstance(trainer, L.Trainer)
    assert all(isinstance(callback, L.Callback) for callback in callbacks)

    # The optimizer and the scheduler are built when training begins, with what the Trainer then knows.
    model.trainer = SimpleNamespace(estimated_stepping_batches=100, max_epochs=10)
    built = model.configure_optimizers()
    assert isinstance(built["optimizer"] if isinstance(built, dict) else built, torch.optim.Optimizer)


def test_the_defaults_are_digits_on_a_resnet20_with_freezing(configure):
    config = configure()

    assert config.model.net._target_ == "lightning_egeria.demos.resnet.CifarResNet"
    assert config.model.net.depth == 20
    assert config.data._target_ == "lightning_egeria.demos.data.DigitsData"
    assert list(config.callbacks) == ["freezing"]


def test_nothing_freezes_without_the_callback(configure):
    assert not configure("callbacks=none").get("callbacks")


def test_wrappers_of_the_data_stand_in_their_order(configure):
    config = configure("goodput=adaptive", "cache=disk", "selecting=queue", "goodput.max_batch_size=200")
    check(config)
    outermost = data_of(config)  # all at once: which may train together is known in `fit`
    assert isinstance(outermost, SelectiveBackprop)
    outer = outermost.datamodule
    assert isinstance(outer, FrozenPrefixCache)
    assert isinstance(outer.datamodule, AdaptiveBatchSize)
    assert isinstance(outer.datamodule.datamodule, DigitsData)
    assert outer.datamodule.max_batch_size == 200


def test_any_timm_name(configure):
    config = configure("model=timm", "model.net.model_name=mobilenetv3_small_050", "model.num_classes=7")
    net = hydra.utils.instantiate(config.model).net

    assert net.get_classifier().out_features == 7


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], "callbacks.freezing.policy"),
        ([], "data"),
        (["data=cifar10"], "data"),
        *(
            ([method.option.replace("/", "=")], name if method.wraps_data else f"callbacks.{name}")
            for name, method in CONFIGURABLE.items()
        ),
    ],
)
def test_defaults_written_in_a_config_are_those_of_the_code(configure, overrides, keys):
    node = configure(*overrides)
    for key in keys.split("."):
        node = node[key]
    parameters = inspect.signature(hydra.utils.get_class(node._target_)).parameters

    written = {name: value for name, value in node.items() if name in parameters and not hasattr(value, "items")}
    defaults = {name: parameters[name].default for name in written}
    required = {name for name, default in defaults.items() if default is inspect.Parameter.empty}

    assert written == defaults | {name: written[name] for name in required}
    # What the code takes can be overridden without a plus sign.
    assert set(parameters) <= set(node) | {"datamodule"}


def test_the_classes_named_here_are_the_ones_configured(configure):
    assert isinstance(hydra.utils.instantiate(configure().model).net, CifarResNet)
    assert isinstance(hydra.utils.instantiate(configure().data), DigitsData)
    assert isinstance(hydra.utils.instantiate(configure("data=cifar10").data), Cifar10Data)


@pytest.mark.parametrize("group", ["experiment", "debug", "hparams_search"])
def test_what_changes_several_groups_says_how_to_run_it(group):
    for path in (CONFIG_DIR / group).glob("*.yaml"):
        assert re.search(f"# egeria-train (-m )?{group}={path.stem}", path.read_text())


def test_what_is_searched_exists(configure):
    for path in (CONFIG_DIR / "hparams_search").glob("*.yaml"):
        searched = OmegaConf.load(path).hydra.sweeper.params
        assert searched
        assert all(OmegaConf.select(configure(), key) is not None for key in searched)


def test_an_option_leaves_nothing_of_the_one_before(configure):
    assert "momentum" not in configure("optimizer=adamw").model.optimizer
    assert configure("scheduler=onecycle").model.scheduler.max_lr == 0.1
    assert configure("scheduler=onecycle", "optimizer=adamw").model.scheduler.max_lr == 1e-3
    assert "milestones" not in configure("scheduler=cosine").model.scheduler
    assert "T_max" not in configure("scheduler=stepdecay").model.scheduler
    assert configure("scheduler=cosine").model.scheduler_length_name == "T_max"
    assert configure("callbacks=finetuning").callbacks.freezing.policy.pretrained is True


@pytest.mark.parametrize("path", sorted((CONFIG_DIR / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_size_of_an_experiment_is_complete(configure, path):
    config = configure(f"experiment={path.stem}")
    assert config.size == "full"
    assert {"small", "full"} <= set(config.sizes)
    for size, values in config.sizes.items():
        config.size = size
        assert config.trainer.max_epochs == values.max_epochs
        OmegaConf.resolve(copy.deepcopy(config))


def test_an_experiment_may_set_any_key(configure, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 5\ntrainer: {max_epochs: 2}\n")
    config = configure("experiment=mine", f"hydra.searchpath=['file://{tmp_path}']")
    assert (config.seed, config.trainer.max_epochs) == (5, 2)
    assert configure("experiment=mine", "seed=6", f"hydra.searchpath=['file://{tmp_path}']").seed == 6


def test_the_docs_list_every_option():
    text = (CONFIG_DIR.parent / "docs" / "egeria-train.md").read_text()
    rows = dict(re.findall(r"^\| (`\w+`)[^|]* \| (.*) \|$", text, flags=re.MULTILINE))
    for group, option in OPTIONS:
        if group in ("callbacks", *WRAPPERS):
            assert f"`{group}={option}`" in text or option == "none"
            continue
        if group == "experiment":  # "the workloads of the proof"
            continue
        assert f"`{option}`" in rows[f"`{group}`"]
