"""Finding mistakes in a configuration of `egeria-train`, with one line that names the key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError, OmegaConfBaseException
from yaml import YAMLError

from lightning_egeria.cli.methods import METHODS, WRAPPERS
from lightning_egeria.cli.signatures import check_value, line_of, parameters_of
from lightning_egeria.errors import ArgumentError, EgeriaError, near_match

_PACKAGE = Path(__file__).resolve().parent.parent
# A wheel carries conf/ inside the package; a checkout has it beside the package.
CONFIG_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
CONFIG_NAME = "train"
_OWN = {"seed": int, "ckpt_path": str | None, "optimized_metric": str | None, "run_dir": str}
_EXTRAS = {"hydra/sweeper/optuna": "optuna", "hydra/launcher/submitit": "submitit"}


def check(config: DictConfig, importing: bool = True) -> None:
    """Check that the classes to build exist and take their arguments.

    Args:
        config: a configuration.
        importing: whether the modules of the classes may be imported, as in `parameters_of`.

    Raises:
        ArgumentError: if one does not; the message names the key, the expected type and the value.
    """
    try:
        content: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]  # a DictConfig
    except InterpolationKeyError as error:
        wanted = line_of(error).split("'")[1]
        raise ArgumentError(f"{line_of(error)}.{near_match(wanted, _keys(config))}") from error
    groups = [path.name for path in CONFIG_DIR.iterdir() if path.is_dir()]
    for key, value in content.items():
        if key in _OWN:
            check_value(key, value, _OWN[key], "egeria-train")
        elif near := near_match(key, [*groups, *_OWN]) if key not in groups else "":
            raise ArgumentError(f"{key}: no such setting.{near}")  # without a near match, it may be for interpolations
    if not 0 <= content["seed"] < 2**32:
        raise ArgumentError(f"seed: expected a number from 0 to {2**32 - 1}, got {content['seed']}")
    for name, callback in (content.get("callbacks") or {}).items():
        if not isinstance(callback, dict) or "_target_" not in callback:
            near = near_match(name, [other for other in content["callbacks"] if other != name], "callbacks.")
            raise ArgumentError(f"callbacks.{name}: expected a _target_, got none.{near}")
    for group in WRAPPERS:
        if content.get(group) and "_target_" not in content[group]:
            options = sorted(path.stem for path in (CONFIG_DIR / group).iterdir() if path.stem != "none")
            raise ArgumentError(f"{group}: expected a _target_, got none. Set {group}={' or '.join(options)} as well")
    for key, node in _targets(content, ""):
        _check_arguments(key, node, importing)


def explain(error: BaseException, arguments: Sequence[str], importing: bool = True) -> str | None:
    """Return one message for the user, or None for an error that is not about the configuration.

    Args:
        error: the error.
        arguments: arguments of the command line.
        importing: whether modules may be imported for a better message, as in `parameters_of`.
    """
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if isinstance(error, InstantiationException):
        message, _, key = line_of(error).partition(" full_key: ")
        reason = next((cause for cause in causes if isinstance(cause, EgeriaError)), causes[1 % len(causes)])
        prefix = "" if isinstance(reason, EgeriaError | HydraException) else f"{type(reason).__name__}: "
        return f"{key}: {prefix}{message if reason is error else line_of(reason)}"
    lightnings = any(kind.__name__ == "MisconfigurationException" for kind in type(error).__mro__)
    if isinstance(error, EgeriaError) or lightnings:
        return line_of(error)
    run_dir = next((one.partition("=")[2] for one in arguments if one.startswith("run_dir=")), "runs")
    path = error.filename if isinstance(error, OSError) else None
    if path is not None and Path(run_dir).absolute().is_relative_to(Path(path).absolute()):
        return f"run_dir={run_dir}: this folder cannot be made ({line_of(error)})"
    if isinstance(error, OverrideParseException):
        key, equals, _ = error.override.partition("=")
        form = f"A value with = , : or brackets needs two pairs of quotes: \"{key}='VALUE'\""
        if not equals:
            form = "Write key=value, as in trainer.max_epochs=5; egeria-train --help lists the keys"
        return f"cannot read {error.override} as an override. {form}"
    if isinstance(error, MissingConfigException) and "/" in (wanted := error.missing_cfg_file or ""):
        extra = next((extra for name, extra in _EXTRAS.items() if wanted.startswith(name)), None)
        group, _, option = wanted.rpartition("/")
        if extra is not None:
            return f"{group}={option} is not installed. Run: pip install 'lightning-egeria[{extra}]'"
        # Hydra names no options for one of a list, as in callbacks=[freezing,partial].
        own = (path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))
        return _no_such_option(group, option, list(error.options or sorted(own)))
    if isinstance(causes[-1], ConfigKeyError | ConfigAttributeError) and causes[-1].full_key:
        return _no_such_key(causes[-1], arguments, importing)
    if str(error).startswith("Config group override must be a string"):  # Hydra does not name the override
        return f"{line_of(error)}, in: {' '.join(arguments)}"
    return line_of(error) if isinstance(error, HydraException | OmegaConfBaseException | YAMLError) else None


def _check_arguments(key: str, node: Mapping[str, Any], importing: bool) -> None:
    target = node["_target_"]
    parameters, open_ended = parameters_of(target, f"{key}._target_", importing)
    for name, value in node.items():
        if name in parameters:
            check_value(f"{key}.{name}", value, parameters[name].annotation, target)
        elif not open_ended and not re.fullmatch("_.*_", name):
            near = near_match(name, parameters, f"{key}.") or f" It takes: {', '.join(parameters)}"
            raise ArgumentError(f"{key}.{name}: {target} has no such argument.{near}")


def _no_such_option(group: str, option: str, options: Sequence[str]) -> str:
    return f"{group}={option}: no such option.{near_match(option, options)} Options: {', '.join(options)}"


def _no_such_key(error: OmegaConfBaseException, arguments: Sequence[str], importing: bool) -> str:
    wanted = error.full_key or ""
    given = next((argument for argument in arguments if argument.startswith(wanted)), wanted)
    parent, dot, name = wanted.rpartition(".")
    node = error.parent_node if isinstance(error.parent_node, DictConfig) else OmegaConf.create()
    target, known = node.get("_target_"), [str(key) for key in node if key != "hydra"]
    taken = list(parameters_of(target, importing=importing)[0]) if target else []
    if name in taken:
        return f"{wanted}: the configuration does not have this key, but {target} does. Add it with a plus: +{given}"
    keys = _keys(node._get_root())
    longer = [key for key in keys if key.endswith(f".{given.partition('=')[0]}")]
    deeper = [key for key in keys if parent and key.startswith(f"{parent}.") and key.endswith(f".{name}")]
    near = next((f" Did you mean {key!r}?" for key in longer + deeper), "")
    near = near or near_match(name, known, f"{parent}{dot}") or near_match(name, taken, f"+{parent}{dot}")
    near = near or _near_key(name, [key for key in keys if key.startswith(f"{parent}{dot}")])
    near = near or _near_key(name, [key for key in _of_wrappers() if key.startswith(f"{parent}{dot}")])
    near = near or f" Keys: {', '.join(known) or 'none'}"
    return f"{wanted}: no such key.{near}"


def _near_key(name: str, keys: Sequence[str]) -> str:
    """Return the sentence "Did you mean ...?" with the key whose last part is closest; empty if none is close."""
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
    near = difflib.get_close_matches(name, by_name, n=1)
    return f" Did you mean {by_name[near[0]]!r}?" if near else ""


def _of_wrappers() -> list[str]:
    """Return the keys of the methods that wrap the data, which are not in a configuration that leaves these out."""
    files = ((name, CONFIG_DIR / f"{METHODS[name].option}.yaml") for name in WRAPPERS)
    return [f"{name}.{key}" for name, path in files for key in _keys(OmegaConf.load(path))]


def _keys(config: Any) -> list[str]:
    """Return all keys of a configuration, with the keys of their parents in front."""
    content = OmegaConf.to_container(config, resolve=False)
    return [key for key, _ in _nodes(content, "") if key and not key.startswith("hydra.")]


def _targets(content: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, node) for name, node in _nodes(content, key) if isinstance(node, dict) and "_target_" in node)


def _nodes(content: Any, key: str) -> Iterator[tuple[str, Any]]:
    yield key, content
    for name, value in content.items() if isinstance(content, dict) else ():
        yield from _nodes(value, f"{key}.{name}" if key else str(name))
