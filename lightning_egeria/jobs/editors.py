"""The schema of a description as JSON schema, for editors."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from lightning_egeria.core.programs.arguments import LARGEST
from lightning_egeria.jobs.schema import Job

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of `Job`, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "job of egeria",
        **_of(Job, {}),
    }


def _of(kind: Any, rules: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(kind, types.UnionType):
        inner, _ = typing.get_args(kind)
        return {"anyOf": [_of(inner, rules), {"type": "null"}]}
    if dataclasses.is_dataclass(kind):
        return _of_dataclass(kind)
    if typing.get_origin(kind) is list:
        return {"type": "array", "items": _of(typing.get_args(kind)[0], rules)}
    if typing.get_origin(kind) is dict:
        inside = {name: rule for name, rule in rules.items() if name != "keys"}
        names = {"pattern": f"^({rules['keys']})$"}
        return {"type": "object", "propertyNames": names, "additionalProperties": _of(typing.get_args(kind)[1], inside)}
    if kind is Any:
        form = dict(rules["form"])
        return {"anyOf": [form, {"type": "null"}]} if rules.get("nullable") else form
    schema: dict[str, Any] = {"type": _TYPES[kind]}
    if kind is str:
        # The texts of a file stand as they are: 1e-3 and 5 are texts too.
        schema["type"] = ["string", "number", "boolean"]
    if "pattern" in rules:
        schema["pattern"] = f"^({rules['pattern']})$"
    if kind in (int, float):
        schema |= {"minimum": rules.get("least", -LARGEST), "maximum": LARGEST}
    return schema


def _of_dataclass(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    properties = {
        field.name: {"description": field.metadata["help"], **_of(hints[field.name], field.metadata)}
        for field in fields
    }
    required = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema
