"""Experiments of `egeria-train`: their mistakes before they run, what is known of them, the overrides of a method."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lightning_egeria.cli.configuration import CONFIG_DIR, CONFIG_NAME, check, explain
from lightning_egeria.cli.methods import CONFIGURABLE
from lightning_egeria.errors import ArgumentError
from lightning_egeria.jobs.optimisations import Choice, Facts, Measured

DEFAULT = "default"  # egeria-train without an experiment
_PACKAGE = "lightning_egeria."
_STEPS = ("MultiStepLR", "StepLR", "step_decay")


def arguments_of(experiment: str, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of `egeria-train` for an experiment."""
    return [*([] if experiment == DEFAULT else [f"experiment={experiment}"]), *overrides]


def composed(arguments: Sequence[str], variables: Mapping[str, str] = os.environ) -> DictConfig:
    """Return the configuration that `egeria-train` would train, and check that its classes take their arguments.

    Args:
        arguments: of `egeria-train`.
        variables: the environment that the job will have.

    Raises:
        ArgumentError: for a mistake; the message names the key and the near match.
    """
    with _environment(variables):
        try:
            with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"):
                config = compose(CONFIG_NAME, [*arguments, "run_dir=results"])
            check(config, importing=False)  # the description may come from a stranger
        except Exception as error:  # Hydra and the classes that it looks up may raise anything
            message = explain(error, arguments, importing=False)
            if message is None:
                raise
            raise ArgumentError(message) from error
        # What stands in variables is resolved here, for this process only.
        OmegaConf.resolve(config)
    return config


def facts_of(config: DictConfig, measured: Measured | None = None) -> Facts:
    """Return what a configuration says of its run."""
    model, trainer, data = config.model, config.trainer, config.data
    policy = OmegaConf.select(config, "callbacks.freezing.policy.pretrained")
    weights = OmegaConf.select(config, "model.weights") or OmegaConf.select(config, "model.net.weights")
    pretrained = bool(weights or OmegaConf.select(config, "model.net.pretrained") or policy is True)
    return Facts(
        trains=True,
        pretrained=pretrained,
        own_model=not model.get("_target_", "").startswith(_PACKAGE),
        epochs=trainer.get("max_epochs"),
        schedule=_schedule(model.get("scheduler")),
        # The data modules of this package augment nothing unless they say so.
        augmented=data.get("augment", False if data.get("_target_", "").startswith(_PACKAGE) else None),
        ranks=_ranks(trainer),
        strategy=str(trainer.get("strategy", "auto")),
        measured=measured,
    )


def cost_key(config: DictConfig, code: str) -> str:
    """Return the key under which the costs of a run are kept: the same code on the same data with the same ranks."""
    content = OmegaConf.to_container(config)
    assert isinstance(content, dict)
    kept = {"model": content["model"], "data": content["data"], "ranks": _ranks(config.trainer), "code": code}
    kept["model"] = {name: value for name, value in kept["model"].items() if name in ("_target_", "net", "num_classes")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def overrides_for(choices: Sequence[Choice], pretrained: bool | None) -> list[str]:
    """Return the overrides of `egeria-train` that switch methods on and off."""
    callbacks, wrappers, options = [], [], []
    for choice in choices:
        rest, method = dict(choice.options), CONFIGURABLE[choice.method]
        group, _, option = method.option.partition("/")
        if method.wraps_data:
            wrappers.append(f"{group}={rest.pop('mode', option) if choice.on else 'none'}")
            prefix = group
        else:
            prefix = f"callbacks.{choice.method}"
            if choice.on:
                callbacks.append("finetuning" if choice.method == "freezing" and pretrained else choice.method)
        if choice.on:
            options += [f"{prefix}.{name}={_literal(value)}" for name, value in _flat(rest)]
    chosen = callbacks[0] if len(callbacks) == 1 else f"[{','.join(callbacks)}]"
    return [f"callbacks={chosen if callbacks else 'none'}", *wrappers, *options]


def checkpoint_overrides(every_steps: int | None) -> list[str]:
    """Return the overrides of `egeria-train` that let a job save when it is stopped, and every few steps."""
    prefix = "+callbacks.resuming"
    overrides = [f"{prefix}._target_=lightning_egeria.ResumableCheckpoints"]
    return overrides if every_steps is None else [*overrides, f"{prefix}.every_n_steps={every_steps}"]


def _flat(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", deeper) for inner, deeper in _flat(value))
        else:
            yield name, value


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(_literal(part) for part in value) + "]"
    return str(value)


def _schedule(scheduler: Any) -> str | None:
    if scheduler is None:
        return "constant"
    target = scheduler.get("_target_", "")
    return "steps" if target.endswith(_STEPS) else "smooth"


def _ranks(trainer: DictConfig) -> int:
    devices = trainer.get("devices", 1)
    count = len(devices) if hasattr(devices, "__len__") and not isinstance(devices, str) else devices
    return int(count) * int(trainer.get("num_nodes", 1)) if str(count).isdigit() else 1


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
