"""Descriptions in YAML files, read along the types of dataclasses: each mistake with its line and the near match."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from lightning_egeria.core.programs.arguments import LARGEST
from lightning_egeria.core.programs.files import read_text
from lightning_egeria.errors import DescriptionError, near_match

LARGEST_BYTES = 2**17  # a few seconds of parsing
MOST_MISTAKES = 50  # in one message
DEEPEST = 30
_CORE = "tag:yaml.org,2002:"
_WANTED = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


Rules = Callable[[Mapping[str, Any]], Iterator[tuple[str, str]]]
_Content = TypeVar("_Content")


def key(help: str, **rules: Any) -> dict[str, Any]:
    """Return the metadata of a field of a dataclass that a file describes.

    Args:
        help: what it means.
        rules: ``pattern`` of its text, ``least`` number (the most is `LARGEST`), ``keys``: a pattern of the names in a
            map, ``form``: the JSON schema of a field of type Any, which may be ``nullable``.
    """
    return {"help": help, **rules}


@dataclasses.dataclass
class Description(Generic[_Content]):
    """What a file describes.

    Attributes:
        content: as a dataclass.
        path: of the file.
        lines: file and line of each key, by its dotted path.
    """

    content: _Content
    path: Path
    lines: dict[str, str]

    @property
    def folder(self) -> Path:
        """Folder that relative paths start from."""
        return self.path.parent

    def mistake(self, key: str, message: str) -> str:
        """Return a line that says where the mistake is, and which."""
        near = key
        while near and near not in self.lines:
            near = near.rpartition(".")[0]
        return f"{self.lines.get(near, self.path.name)}: {key}: {message}"


def read(
    path: Path, kind: type[_Content], rules: Rules = lambda values: iter(()), overrides: Sequence[str] = ()
) -> Description[_Content]:
    """Read a description.

    Args:
        path: YAML file.
        kind: dataclass whose fields have the metadata of `key`.
        rules: yields the key and the message of each mistake in plain values that the types do not tell.
        overrides: keys to set, as in ``resources.devices=2``.

    Raises:
        DescriptionError: with all mistakes, each with its line.
    """
    try:
        text = read_text(path, LARGEST_BYTES)
    except (OSError, UnicodeError) as error:
        raise DescriptionError(f"{path}: cannot read it: {error}") from error
    root = _parsed(text, path.name)
    if not isinstance(root, yaml.MappingNode):
        wanted = " and ".join(required_of(kind))
        raise DescriptionError(f"{path.name}:1: expected keys such as {wanted}, got {_kind(root)}")
    reader = _Reader()
    for override in overrides:
        reader.override(root, override)
    values = reader.structure(root, kind, "")
    if not reader.mistakes:
        reader.check(values, rules)
    if reader.mistakes:
        raise DescriptionError(reader.told())
    return Description(built(kind, values), path.absolute(), reader.lines)


def required_of(kind: Any) -> list[str]:
    """Return the fields of a dataclass that have no default."""
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is missing and field.default_factory is missing
    ]


def built(kind: Any, values: Any) -> Any:
    """Return a value of a type, dataclasses included, from plain values that fit."""
    kind = _without_none(kind)
    if values is None:
        return None
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {name: built(hints[name], value) for name, value in values.items()}
        return kind(**fields)  # type: ignore[operator]  # a class
    if typing.get_origin(kind) is dict:
        return {name: built(typing.get_args(kind)[1], value) for name, value in values.items()}
    return values


def _parsed(text: str, name: str) -> yaml.Node:
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise DescriptionError(f"{name}:{event.start_mark.line + 1}: nested too deep")
            anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
            line = f"{name}:{event.start_mark.line + 1}"
            if anchor is not None:
                raise DescriptionError(f"{line}: anchors and aliases are not allowed. Write the value out")
            if tag is not None:
                raise DescriptionError(f"{line}: the tag {tag} is not allowed. Use plain text, numbers, lists and maps")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise DescriptionError(f"{name}:{mark.line + 1 if mark else 1}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise DescriptionError(f"{name}: not YAML: {' '.join(str(error).split())}") from error
    if root is not None:
        _name_lines(root, name)
    return root


def _name_lines(node: yaml.Node, name: str, numbered: bool = True) -> None:
    node.where = f"{name}:{node.start_mark.line + 1}" if numbered else name
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for part in pair:
                _name_lines(part, name, numbered)
    elif isinstance(node, yaml.SequenceNode):
        for part in node.value:
            _name_lines(part, name, numbered)


def _kind(node: yaml.Node | None) -> str:
    if node is None:
        return "an empty file"
    return {yaml.MappingNode: "a map", yaml.SequenceNode: "a list"}.get(type(node)) or repr(node.value)


class _Reader:
    """Walks the nodes along the types of the schema, and collects mistakes."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []
        self.lines: dict[str, str] = {}

    def override(self, root: yaml.MappingNode, override: str) -> None:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise DescriptionError(f"cannot read {override!r} as a setting. Write key=value, as in resources.devices=2")
        value = _parsed(f"value: {text}", override).value[0][1]
        _name_lines(value, override, numbered=False)
        *parents, last = path.split(".")
        node = root
        for name in parents:
            child = next((value for key, value in node.value if key.value == name), None)
            if not isinstance(child, yaml.MappingNode):
                child = yaml.MappingNode(_CORE + "map", [], root.start_mark)
                child.where = override
                _set(node, name, child, override)
            node = child
        _set(node, last, value, override)

    def wrong(self, node: yaml.Node, key: str, message: str) -> None:
        self.mistakes.append(f"{node.where}: {key}: {message}" if key else f"{node.where}: {message}")

    def told(self) -> str:
        """Return all mistakes, one a line; of very many, the first."""
        rest = len(self.mistakes) - MOST_MISTAKES
        return "\n".join(self.mistakes[:MOST_MISTAKES] + ([f"and {rest} more"] if rest > 0 else []))

    def structure(self, node: yaml.Node, kind: Any, path: str) -> dict[str, Any]:
        """Read a map with the keys of a dataclass."""
        hints, values = typing.get_type_hints(kind), {}
        fields = {field.name: field for field in dataclasses.fields(kind)}
        for name, key_node, value in self.pairs(node, path):
            if name not in fields and len(self.mistakes) > MOST_MISTAKES:
                self.mistakes.append("")  # only counted
                continue
            if name not in fields:
                near = near_match(name, fields, f"{path}.".lstrip(".")) or f" Keys: {', '.join(fields)}"
                self.wrong(key_node, _joined(path, name), f"no such key.{near}")
                continue
            self.lines[_joined(path, name)] = value.where
            values[name] = self.value(value, hints[name], fields[name].metadata, _joined(path, name))
        for name in required_of(kind):
            if name not in values:
                self.wrong(node, _joined(path, name), f"is missing: {fields[name].metadata['help']}")
        return values

    def pairs(self, node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, path, f"expected a map of keys, got {_kind(node)}")
            return
        seen: dict[str, str] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.wrong(key_node, path, f"expected a name as key, got {_kind(key_node)}")
            elif key_node.value in seen:
                first = seen[key_node.value]
                self.wrong(key_node, _joined(path, key_node.value), f"stands here twice, first in {first}. Keep one")
            else:
                seen[key_node.value] = key_node.where
                yield key_node.value, key_node, value

    def value(self, node: yaml.Node, kind: Any, rules: Mapping[str, Any], path: str) -> Any:
        inner = _without_none(kind)
        if node.tag == _CORE + "null":
            if inner is not kind or rules.get("nullable"):
                return None
            self.wrong(node, path, f"has no value: {rules['help']}")
        elif inner is Any:
            return self.free(node, path)
        elif dataclasses.is_dataclass(inner):
            return self.structure(node, inner, path)
        elif typing.get_origin(inner) is list:
            return self.sequence(node, typing.get_args(inner)[0], rules, path)
        elif typing.get_origin(inner) is dict:
            return self.mapping(node, typing.get_args(inner)[1], rules, path)
        else:
            return self.scalar(node, inner, rules, path)
        return None

    def sequence(self, node: yaml.Node, kind: Any, rules: Mapping[str, Any], path: str) -> list[Any]:
        if not isinstance(node, yaml.SequenceNode):
            self.wrong(node, path, f"expected a list, got {_kind(node)}")
            return []
        return [self.value(part, kind, rules, f"{path}.{place}") for place, part in enumerate(node.value)]

    def mapping(self, node: yaml.Node, kind: Any, rules: Mapping[str, Any], path: str) -> dict[str, Any]:
        values, inner = {}, {name: rule for name, rule in rules.items() if name != "keys"}
        for name, key_node, value in self.pairs(node, path):
            if not re.fullmatch(rules["keys"], name):
                self.wrong(key_node, path, f"{name!r} is no name that can stand here; it must match {rules['keys']}")
            self.lines[_joined(path, name)] = value.where
            values[name] = self.value(value, kind, inner, _joined(path, name))
        return values

    def scalar(self, node: yaml.Node, kind: type, rules: Mapping[str, Any], path: str) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            self.wrong(node, path, f"expected {_WANTED[kind]}, got {_kind(node)}")
            return None
        text, value = node.value, None
        if kind is str:
            value = text  # as it stands there: `no` and 1e-3 are text
            pattern = rules.get("pattern")
            if pattern is not None and not re.fullmatch(pattern, text):
                self.wrong(node, path, f"expected {rules['help']}, got {text!r}")
        elif kind is bool:
            value = {"true": True, "false": False}.get(text.lower())
        elif re.fullmatch(r"[+-]?[0-9]+" if kind is int else r"[+-]?[0-9.]+([eE][+-]?[0-9]+)?", text):
            try:
                value = kind(text)
            except ValueError:
                value = None
        if value is None:
            self.wrong(node, path, f"expected {_WANTED[kind]}, got {text!r}")
        elif kind in (int, float) and not (least := rules.get("least", -LARGEST)) <= value <= LARGEST:
            bound = f"at least {least}" if value < least else f"at most {LARGEST}"
            self.wrong(node, path, f"must be {bound}, got {text}")
        return value

    def free(self, node: yaml.Node, path: str) -> Any:
        """Read any form; the texts stay as they stand there, but for true and false."""
        self.lines[path] = node.where
        if isinstance(node, yaml.MappingNode):
            return {name: self.free(value, _joined(path, name)) for name, _, value in self.pairs(node, path)}
        if isinstance(node, yaml.SequenceNode):
            return [self.free(part, f"{path}.{place}") for place, part in enumerate(node.value)]
        if node.tag == _CORE + "bool" and node.value.lower() in ("true", "false"):
            return node.value.lower() == "true"
        return node.value

    def check(self, values: Mapping[str, Any], rules: Rules) -> None:
        """Check what the types do not say."""
        for key, message in rules(values):
            near = key
            while near not in self.lines:
                near = near.rpartition(".")[0]
            self.mistakes.append(f"{self.lines[near]}: {key}: {message}")


def _set(node: yaml.MappingNode, name: str, value: yaml.Node, where: str) -> None:
    node.value = [(key, old) for key, old in node.value if key.value != name]
    key = yaml.ScalarNode(_CORE + "str", name, value.start_mark)
    key.where = where
    node.value.append((key, value))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
    return kind
