"""`egeria cache`: what lies in a cache directory, whether it is sound, and how to be rid of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_egeria.caching.store.directory import CacheDirectory, StoreSummary, default_cache_dir
from lightning_egeria.core.programs.arguments import period
from lightning_egeria.core.programs.terminal import printable, takes_json, tell
from lightning_egeria.errors import StoreError

DAY_S = 86400


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.")
        added.add_argument(
            "directory", nargs="?", type=Path, metavar="DIR", help="cache directory; default: that of the user"
        )
        takes_json(added)
        added.set_defaults(run=lambda options: run(options, _directory(options)))
        return added

    command("ls", _list, "list the stores: for which model and data, how large, how full")
    command("verify", _verify, "read every entry and compare it with its checksum; status 1 if one is damaged")
    pruning = command("prune", _prune, "delete the stores that no run has open")
    pruning.add_argument(
        "--older-than",
        type=period,
        default=0,
        metavar="PERIOD",
        help="only stores that no run has used for this long, such as 7d",
    )


def _directory(options: argparse.Namespace) -> CacheDirectory:
    # The default one may not be there yet; one that is named must be.
    return CacheDirectory(options.directory or default_cache_dir(), make=options.directory is None)


def _list(options: argparse.Namespace, directory: CacheDirectory) -> int:
    if options.json:
        tell(options, map(_facts, directory.summaries()), [])
        return 0
    columns = ("store", "frozen modules", "data", "entry", "entries", "on disk", "last used")
    table = Table(*columns, title=escape(printable(directory.path)))
    summaries = directory.summaries()
    for summary in summaries:
        name, size = summary.folder.name[:8], _bytes(summary.bytes_on_disk)
        used = "now, by a run" if summary.in_use else _ago(summary.used_seconds_ago)
        if summary.manifest is None:
            table.add_row(name, "damaged", "", "", "", size, used)
            continue
        about = {key: escape(summary.manifest.about.get(key, "?")) for key in ("model", "modules", "data", "row")}
        entries = f"{summary.present} of {summary.manifest.entries}"
        modules = f"{about['model']}, {about['modules']}"
        table.add_row(name, modules, about["data"], about["row"], entries, size, used)
    _print(table)
    total = sum(summary.bytes_on_disk for summary in summaries)
    print(f"{len(summaries)} stores, {_bytes(total)}")
    return 0


def _facts(summary: StoreSummary) -> dict[str, Any]:
    manifest = summary.manifest  # None if it is damaged
    return {
        "store": summary.folder.name,
        "about": dict(manifest.about) if manifest is not None else None,
        "entries": manifest.entries if manifest is not None else None,
        "present": summary.present,
        "bytes": summary.bytes_on_disk,
        "in_use": summary.in_use,
        "used_seconds_ago": summary.used_seconds_ago,
    }


def _verify(options: argparse.Namespace, directory: CacheDirectory) -> int:
    damaged = False
    for summary in directory.summaries():
        name = summary.folder.name
        found: dict[str, Any] = {"store": name, "sound": None, "damaged": None, "reason": ""}
        try:
            found["sound"], found["damaged"] = directory.verify(summary.folder)
            text = f"{name}: {found['sound']} entries are sound, {found['damaged']} are damaged"
        except StoreError as error:
            found["reason"] = str(error)
            text = f"{name}: damaged: {printable(error)}"
        damaged = damaged or found["damaged"] != 0
        tell(options, [found], [text])
    if damaged:
        remedy = "A damaged entry is a miss for the runs that use it; `egeria cache prune` removes whole stores."
        tell(options, [], [remedy])
    return int(damaged)


def _prune(options: argparse.Namespace, directory: CacheDirectory) -> int:
    freed = 0
    for summary in directory.summaries():
        name, size, removed = summary.folder.name, summary.bytes_on_disk, False
        if summary.in_use:
            text = "kept, a run uses it"
        elif summary.used_seconds_ago < options.older_than:
            text = f"kept, used {_ago(summary.used_seconds_ago)}"
        elif removed := directory.remove(summary.folder):
            freed += size
            text = f"removed, {_bytes(size)}"
        else:
            text = "could not be removed: it holds files that are not the cache's, or is in use"
        reason = "" if removed else text
        tell(options, [{"store": name, "removed": removed, "bytes": size, "reason": reason}], [f"{name}: {text}"])
    tell(options, [], [f"{_bytes(freed)} are free again"])
    return 0


def _print(table: Table) -> None:
    # Where it is no terminal, every column is wanted in full.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _bytes(count: int) -> str:
    """In words.

    >>> _bytes(1_500_000)
    '1.5 MB'
    """
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _ago(seconds: float) -> str:
    """In words.

    >>> _ago(90), _ago(3 * 86400)
    ('2 min ago', '3 days ago')
    """
    if seconds < 5400:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.0f} h ago" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} days ago"
