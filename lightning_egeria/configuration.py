"""What is wrong with a configuration of `egeria-train`: the key, the file that it stands in, and the near match."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import pydoc
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from lightning_egeria.errors import ArgumentError, EgeriaError

_PACKAGE = Path(__file__).resolve().parent
# A wheel carries conf/ inside the package; a checkout has it beside the package.
CONFIG_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
CONFIG_NAME = "train"
_MAIN = CONFIG_DIR / f"{CONFIG_NAME}.yaml"
_EXTRAS = {"hydra/sweeper/optuna": "optuna", "hydra/launcher/submitit": "submitit"}


@dataclasses.dataclass(frozen=True)
class Sources:
    """What a configuration was put together from.

    Attributes:
        overrides: of the command line.
        choices: option of each config group.
        folders: where config files are looked for.
    """

    overrides: Sequence[str]
    choices: Mapping[str, str | None]
    folders: Sequence[Path]

    @classmethod
    def of(cls, hydra: Any) -> Sources:
        """Read the node that Hydra keeps of itself."""
        folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
        return cls(list(hydra.overrides.task), dict(hydra.runtime.choices), folders)

    def origin(self, key: str) -> str:
        """Where a key, `model.net.depth`, got its value: a path, or the command line."""
        for override in OverridesParser.create().parse_overrides(list(self.overrides)):
            if f"{key}.".startswith(f"{override.key_or_group}.") and override.key_or_group not in self.choices:
                return "the command line"
        for group, option in reversed(list(self.choices.items())):
            for path in self._files(group, option):
                if _holds(path, group, key):
                    return _shown(path)
        return _shown(_MAIN)

    def _files(self, group: str, option: str | None) -> Iterator[Path]:
        """The file of an option, and those of its group that it is made from."""
        for path in (folder / group / f"{option}.yaml" for folder in self.folders):
            if path.is_file():
                yield path
                for default in _content(path).get("defaults", ()):
                    if isinstance(default, str) and default != "_self_":
                        yield from self._files(group, default)


def check(config: DictConfig, sources: Sources) -> None:
    """See that what is to be built exists, and takes the arguments that it is given.

    Raises:
        ArgumentError: something does not; the message names it, the file, and what was probably meant.
    """
    content: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]  # a DictConfig gives a dict
    known = [*_groups(), *_content(_MAIN)]
    for key in content:
        # A key of the user's own may be there for interpolations to read.
        if key not in known and (near := near_match(key, known)):
            raise ArgumentError(f"{key} ({sources.origin(key)}): nothing reads this.{near}")
    callbacks = content.get("callbacks") or {}
    for name, callback in callbacks.items():
        if not isinstance(callback, dict) or "_target_" not in callback:
            key = f"callbacks.{name}"
            near = near_match(name, [other for other in callbacks if other != name], "callbacks.")
            raise ArgumentError(f"{key} ({sources.origin(key)}): a callback needs a _target_, and this has none.{near}")
    for key, node in _targets(content, ""):
        target = node["_target_"]
        parameters = _parameters(_located(target, f"{key}._target_ ({sources.origin(f'{key}._target_')})"))
        if parameters is None:
            continue
        for name in node:
            if name not in parameters and not re.fullmatch("_.*_", name):
                near = near_match(name, parameters, f"{key}.") or f" It takes: {', '.join(parameters)}"
                raise ArgumentError(
                    f"{key}.{name} ({sources.origin(f'{key}.{name}')}): {target} takes no such argument.{near}"
                )


def explain(error: BaseException, arguments: Sequence[str]) -> str | None:
    """Return the one message for the user, or None for an error that is not about what was configured.

    Args:
        error: what was raised.
        arguments: of the command line.
    """
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    intended = next((cause for cause in causes if isinstance(cause, EgeriaError)), None)
    if isinstance(error, InstantiationException):
        message, _, key = _line(error).partition(" full_key: ")
        if intended is None and len(causes) > 1:
            message = f"{type(causes[1]).__name__}: {_line(causes[1])}"
        return (f"{key}: " if key else "") + (str(intended) if intended else message)
    if intended is not None:
        return str(intended)
    if isinstance(error, MissingConfigException):
        return _no_such_option(error, arguments)
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    last = causes[-1]
    if isinstance(last, ConfigKeyError | ConfigAttributeError) and last.full_key:
        return _no_such_key(last, arguments)
    if isinstance(last, OmegaConfBaseException):
        return _wrong_value(last, arguments)
    if isinstance(error, HydraException):
        return _not_composed(error, arguments)
    # Hydra has no exception of its own for a number where the name of an option belongs.
    return _line(error) if isinstance(error, YAMLError) or str(error).startswith("Config group override") else None


def _unreadable(error: OverrideParseException) -> str:
    key, _, value = error.override.partition("=")
    message = f"{error.override} cannot be read: {str(error).splitlines()[0]}"
    if not value:
        return message
    return f"{message}. A value with = , : or brackets in it takes two pairs of quotes: \"{key}='{value}'\""


def _no_such_option(error: MissingConfigException, arguments: Sequence[str]) -> str:
    wanted = error.missing_cfg_file or ""
    group, _, option = wanted.rpartition("/")
    for name, extra in _EXTRAS.items():
        if wanted.startswith(name):
            return f"{group}={option} is not installed. It comes with: pip install 'lightning-egeria[{extra}]'"
    if not group:
        return f"{wanted}: there is no such file in {_shown(CONFIG_DIR)}"
    options = list(error.options or ())
    file = "" if any(group in argument for argument in arguments) else _saying(f"{group}: {option}", arguments)
    there = f"There are: {', '.join(options)}" if options else "It has none"
    near = near_match(option, options)
    return f"{group}={option}{file}: there is no such option in {_shown(CONFIG_DIR / group)}.{near} {there}"


def _no_such_key(error: OmegaConfBaseException, arguments: Sequence[str]) -> str:
    wanted = error.full_key or ""
    parent_key, _, name = wanted.rpartition(".")
    node = error.parent_node if isinstance(error.parent_node, DictConfig) else OmegaConf.create()
    prefix = f"{parent_key}." if parent_key else ""
    given = next((argument for argument in arguments if argument.startswith(wanted)), wanted)
    message = f"{wanted}: there is no such key in {_file_of(parent_key, arguments)}."
    target = node.get("_target_")
    taken = [] if target is None else _parameters(pydoc.locate(target)) or []
    if name in taken:
        return f"{message} {target} takes it; what is new needs a plus: +{given}"
    for key in _keys(OmegaConf.to_container(node._get_root(), resolve=False), ""):
        if key.endswith(f".{given.split('=')[0]}"):
            return f"{message} Did you mean {key!r}?"
    keys = list(dict.fromkeys([*map(str, node), *([] if parent_key else _groups())]))
    near = near_match(name, keys, prefix) or near_match(name, taken, f"+{prefix}")
    return message + (near or f" It has: {', '.join(key for key in keys if key != 'hydra') or 'none'}")


def _wrong_value(error: OmegaConfBaseException, arguments: Sequence[str]) -> str:
    message = str(error).splitlines()[0]
    missing = re.search("Interpolation key '(.+)' not found", message)
    if not missing:
        return f"{error.full_key}: {message}" if error.full_key else message
    file = _saying(rf"\$\{{{re.escape(missing[1])}", arguments)
    return f"{message}{file}.{near_match(missing[1], list(_keys(_composed(arguments), '')))}"


def _not_composed(error: HydraException, arguments: Sequence[str]) -> str:
    message = _line(error)
    if sweep := re.search("Ambiguous value for argument '((.+?)=(.+?))'", message):
        return f"{sweep[1]}: with several values there are several runs, add -m; a list is {sweep[2]}=[{sweep[3]}]"
    name = re.search("Could not (?:override|delete).*? '(.+?)'", message)
    if not name:
        return message
    return message + near_match(name[1], [*_groups(), *_keys(_composed(arguments), "")])


def _file_of(key: str, arguments: Sequence[str]) -> str:
    """The file that a node comes from, of a configuration that could not be put together as it was asked for."""
    if not key or not (hydra := _composed(arguments).get("hydra")):
        return _shown(_MAIN)
    return Sources([], hydra["runtime"]["choices"], _folders(arguments)).origin(key)


def _composed(arguments: Sequence[str]) -> dict[str, Any]:
    """The configuration with the options that were asked for, and nothing else; empty if that does not work either."""
    asked = [argument for argument in arguments if argument.split("=")[0] in _groups() and "," not in argument]
    search = [f"hydra.searchpath=[{','.join(repr(f'file://{folder}') for folder in _folders(arguments)[1:])}]"]
    # A job that has begun has its Hydra.
    ready = GlobalHydra.instance().is_initialized()
    try:
        with contextlib.nullcontext() if ready else initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            config = compose(CONFIG_NAME, overrides=asked + search, return_hydra_config=True)
    except HydraException:
        return {}
    return OmegaConf.to_container(config, resolve=False)  # type: ignore[return-value]  # keys of a config file are texts


def _folders(arguments: Sequence[str]) -> list[Path]:
    """Where config files are looked for."""
    line = " ".join(arguments)
    return [CONFIG_DIR, *(Path(found).absolute() for found in re.findall(r"(?:--config-dir|-cd)[ =](\S+)", line))]


def _saying(pattern: str, arguments: Sequence[str]) -> str:
    """The config file with such a line, in brackets with a space in front; empty if there is none."""
    files = (path for folder in reversed(_folders(arguments)) for path in sorted(folder.rglob("*.yaml")))
    found = next((path for path in files if re.search(pattern, path.read_text())), None)
    return f" ({_shown(found)})" if found else ""


def _groups() -> list[str]:
    return sorted(path.name for path in CONFIG_DIR.iterdir() if path.is_dir() and not path.name.startswith("__"))


def _content(path: Path) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return content if isinstance(content, dict) else {}  # type: ignore[return-value]  # keys of a config file are texts


def _holds(path: Path, group: str, key: str) -> bool:
    """Whether a file of a group says something of a key."""
    header = re.search(r"^# @package (\S+)", path.read_text(), flags=re.MULTILINE)
    package = header[1] if header else group.replace("/", ".")
    content: Any = _content(path)
    if package != "_global_":
        if not f"{key}.".startswith(f"{package}."):
            return False
        key = key.removeprefix(package).removeprefix(".")
    for part in key.split(".") if key else ():
        if not isinstance(content, dict) or part not in content:
            return False
        content = content[part]
    return True


def _targets(content: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All that is to be built, with its key."""
    if isinstance(content, dict):
        if "_target_" in content:
            yield key, content
        for name, value in content.items():
            yield from _targets(value, f"{key}.{name}" if key else str(name))


def _keys(content: Any, key: str) -> Iterator[str]:
    for name, value in content.items() if isinstance(content, dict) else ():
        if key or name != "hydra":
            yield f"{key}{name}"
            yield from _keys(value, f"{key}{name}.")


def _located(target: str, where: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        if (found := pydoc.locate(target)) is not None:
            return found
        near = near_match(name, dir(importlib.import_module(module)), f"{module}.")
    except (ImportError, pydoc.ErrorDuringImport) as error:
        near = f" {_line(error)}"
    raise ArgumentError(f"{where}: {target} cannot be found.{near}")


def _parameters(target: Any) -> list[str] | None:
    """The names of what a class or function takes; None if it takes any."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def near_match(word: str, options: Collection[str], prefix: str = "") -> str:
    """A sentence that names the option that a word comes close to, with a space in front; empty if there is none.

    >>> near_match("dpeth", ["depth", "width"], "model.net.")
    " Did you mean 'model.net.depth'?"
    """
    near = difflib.get_close_matches(word, options, n=1)
    return f" Did you mean {prefix + near[0]!r}?" if near else ""


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
