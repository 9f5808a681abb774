"""The tables of the documents that follow from the declarations and the evidence of jobs.

python -m docs.tables
"""

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_egeria.core.programs.arguments import PERIOD, SIZE
from lightning_egeria.core.training.methods import BY_SETTING
from lightning_egeria.jobs.evidence import cache_adds, evidence, pays
from lightning_egeria.jobs.optimisations import KINDS
from lightning_egeria.jobs.schema import Job

ROOT = Path(__file__).resolve().parent.parent
_FORMS = {PERIOD: "period, as `90m`", SIZE: "size, as `16GB`"}


def keys() -> list[str]:
    """Return the lines of the table of all keys of a description."""
    rows = (f"| `{name}` | {form} | {default} | {meaning} |" for name, form, default, meaning in _keys_of(Job, ""))
    return ["| key | value | if left out | meaning |", "|---|---|---|---|", *rows]


def choices() -> list[str]:
    """Return the lines of the table of what `auto` chooses, with the figures that decide."""
    lines = ["| kind of run | method | `auto` | figures |", "|---|---|---|---|"]
    for kind, text in KINDS.items():
        for method in BY_SETTING:
            if method == "cache":
                cells = [
                    (f"cache beside freezing{samples}", cache_adds(kind, augmented))
                    for augmented, samples in ((False, ""), (True, ", samples augmented"))
                    if pays(kind, ["freezing"])[0]
                ]
            else:
                cells = [(method, pays(kind, [method]))] if _is_measured(kind, method) else []
            lines += [f"| {text} | {name} | {'on' if on else 'off'} | {figures} |" for name, (on, figures) in cells]
    return lines


TABLES = {
    "keys": (ROOT / "docs" / "jobs.md", keys),
    "auto": (ROOT / "lightning_egeria" / "jobs" / "README.md", choices),
}


def main() -> None:
    """Write the tables into their documents."""
    for name, (path, lines) in TABLES.items():
        path.write_text(replaced(path.read_text(), name, lines()))


def replaced(document: str, name: str, lines: list[str]) -> str:
    """Return a document with a table in place of the one between its marks."""
    table = "\n".join(["", *lines, ""])
    marked = re.compile(rf"(<!-- docs\.tables: {name} -->\n).*?(?=\n<!-- end of it -->)", re.DOTALL)
    return marked.sub(lambda found: found[1] + table, document)


def _is_measured(kind: str, method: str) -> bool:
    return any(one["kind"] == kind and one["methods"] == [method] for one in evidence()["comparisons"])


def _keys_of(kind: Any, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint, name, rules = hints[field.name], f"{prefix}{field.name}", field.metadata
        inner = typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            yield from _keys_of(hint, f"{name}.")
        elif typing.get_origin(hint) is dict and dataclasses.is_dataclass(inner[1]):
            yield from _keys_of(inner[1], f"{name}.NAME.")
        elif typing.get_origin(hint) is dict:
            yield f"{name}.NAME", _form(inner[1], rules), "none", rules["help"]
        else:
            yield name, _form(hint, rules), _default(field), rules["help"]


def _form(hint: Any, rules: Mapping[str, Any]) -> str:
    if isinstance(hint, types.UnionType):
        return _form(typing.get_args(hint)[0], rules)
    if typing.get_origin(hint) is list:
        return f"list of {_form(typing.get_args(hint)[0], {})}s"
    if hint is Any:
        return ", or ".join(_of_schema(form) for form in rules["form"]["anyOf"])
    if hint is int:
        return f"number from {rules['least']} on" if "least" in rules else "number"
    if hint is bool:
        return "`true` or `false`"
    return _FORMS.get(rules.get("pattern", ""), "text")


def _of_schema(form: Mapping[str, Any]) -> str:
    if "enum" in form:
        return " or ".join(f"`{value}`" for value in form["enum"])
    return {"string": "text", "array": "list of texts", "object": "map of methods"}[form["type"]]


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return "-" if field.default is None else f"`{str(field.default).lower()}`"
    return "needed" if field.default_factory is dataclasses.MISSING else "none"


if __name__ == "__main__":
    main()
