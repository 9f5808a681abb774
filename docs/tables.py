"""The tables of the documents that follow from the declarations of methods and jobs, and from the evidence of jobs.

python -m docs.tables
"""

import dataclasses
import itertools
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning_egeria
from lightning_egeria.cli.configuration import CONFIG_DIR
from lightning_egeria.cli.methods import CONFIGURABLE, METHODS
from lightning_egeria.core.programs.arguments import PERIOD, SIZE
from lightning_egeria.core.training.methods import BOTH_FREEZE, Method
from lightning_egeria.jobs.evidence import cache_adds, evidence, pays
from lightning_egeria.jobs.optimisations import KINDS
from lightning_egeria.jobs.schema import Job

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
_FORMS = {PERIOD: "period, as `90m`", SIZE: "size, as `16GB`"}


def keys() -> list[str]:
    """Return the lines of the table of all keys of a description."""
    rows = (f"| `{name}` | {form} | {default} | {meaning} |" for name, form, default, meaning in _keys_of(Job, ""))
    return ["| key | value | if left out | meaning |", "|---|---|---|---|", *rows]


def choices() -> list[str]:
    """Return the lines of the table of what `auto` chooses, with the figures that decide."""
    lines = ["| kind of run | method | `auto` | figures |", "|---|---|---|---|"]
    for kind, text in KINDS.items():
        for method in CONFIGURABLE:
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


def together() -> list[str]:
    """Return the lines of the table of the methods that run together."""

    def cell(one: Method, other: Method) -> str:
        return "" if one is other else "no" if one.reason_against(other) else "yes"

    return _table(
        ["", *METHODS],
        (
            [f"**{name}** (`{class_of(one).__name__}`)", *(cell(one, other) for other in METHODS.values())]
            for name, one in METHODS.items()
        ),
    )


def reasons() -> list[str]:
    """Return a line for each reason for which methods do not run together."""
    found = [(name, *pair) for name, method in METHODS.items() for pair in method.apart_from.items()]
    freezing = [name for name, method in METHODS.items() if method.freezes]
    found += [(one, other, BOTH_FREEZE) for one, other in itertools.combinations(freezing, 2)]
    return [f"* {name}{f' and {other}' if other != '*' else ''}: {reason}." for name, other, reason in found]


def setups() -> list[str]:
    """Return the lines of the table of the strategies and training steps that methods run with."""
    strategies = {"SingleDeviceStrategy": "one device", "DDPStrategy": "DDP", "ModelParallelStrategy": "FSDP2"}

    def cells(method: Method) -> Iterator[str]:
        for strategy in strategies:
            yield "yes" if strategy in method.strategies else "is one" if not method.strategies else "no"
        for refusal in (method.manual, method.own_batches):
            yield "no" if refusal else "yes"

    heads = ["", *strategies.values(), "manual optimization", "a step that takes `dataloader_iter`"]
    return _table(heads, ([f"[{name}]({_card_of(one)})", *cells(one)] for name, one in METHODS.items()))


def switches() -> list[str]:
    """Return the lines of the table of the options of `egeria-train` that switch methods on."""

    def options(method: Method) -> str:
        group, _, name = method.option.partition("/")
        files = [path.stem for path in sorted((CONFIG_DIR / group).glob("*.yaml"))] if method.wraps_data else [name]
        return ", ".join(f"`{group}={file}`" for file in files if file != "none")

    return _table(
        ["method", "options"], ([f"[{name}]({_card_of(one)})", options(one)] for name, one in CONFIGURABLE.items())
    )


TABLES = {
    "keys": (DOCS / "jobs.md", keys),
    "auto": (ROOT / "lightning_egeria" / "jobs" / "README.md", choices),
    "together": (DOCS / "methods.md", together),
    "reasons": (DOCS / "methods.md", reasons),
    "setups": (DOCS / "support.md", setups),
    "switches": (DOCS / "egeria-train.md", switches),
}


def main() -> None:
    """Write the tables into their documents, and a page for each card of a method."""
    for name, (path, lines) in TABLES.items():
        path.write_text(replaced(path.read_text(), name, lines()))
    for page, content in pages().items():
        page.write_text(content)


def pages() -> dict[Path, str]:
    """Return the pages of the cards of the methods, and what they include."""
    return {
        DOCS / _card_of(method): f"```{{include}} ../../{_folder_of(method)}/README.md\n```\n"
        for method in METHODS.values()
    }


def replaced(document: str, name: str, lines: list[str]) -> str:
    """Return a document with a table in place of the one between its marks."""
    table = "\n".join(["", *lines, ""])
    marked = re.compile(rf"(<!-- docs\.tables: {name} -->\n).*?(?=\n<!-- end of it -->)", re.DOTALL)
    return marked.sub(lambda found: found[1] + table, document)


def class_of(method: Method) -> type[Any]:
    """Return the public class of a method."""
    public = (getattr(lightning_egeria, name) for name in lightning_egeria.__all__)
    (found,) = (one for one in public if getattr(one, "egeria_method", None) is method)
    return found


def _folder_of(method: Method) -> str:
    return class_of(method).__module__.rpartition(".")[0].replace(".", "/")


def _card_of(method: Method) -> str:
    return f"cards/{Path(_folder_of(method)).name}.md"


def _table(heads: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines]


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
