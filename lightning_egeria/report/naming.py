"""Short names of runs, from the settings in which they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lightning_egeria.report.record import RunRecord

LONGEST_NAME = 40


def short_names(records: Sequence[RunRecord], paths: Sequence[Path | None] | None = None) -> list[str]:
    """Return a different name of at most `LONGEST_NAME` characters for each run.

    A name lists the settings in which the run differs from others, with the last part of their keys. Runs that differ
    in no setting keep their names; equal names get the directory or a number.

    Args:
        records: records of the runs.
        paths: files of the records; None for a record that was not read from a file.

    >>> runs = [
    ...     RunRecord("13-05-22", overrides=["model=timm"]),
    ...     RunRecord("13-07-40", overrides=["model=timm", "callbacks.freezing.policy.tolerance=1e-3"]),
    ... ]
    >>> short_names(runs)
    ['defaults', 'tolerance=1e-3']
    """
    names = [_shortened(name) for name in _by_settings(records) or [record.name for record in records]]
    if paths is not None:
        twice = Counter(names)
        names = [
            _shortened("/".join(path.resolve().parent.parts[-2:])) if path is not None and twice[name] > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
    seen: Counter[str] = Counter()
    totals = Counter(names)
    for place, name in enumerate(names):
        seen[name] += 1
        if totals[name] > 1:
            names[place] = f"{name} ({seen[name]})"
    return names


def with_short_names(records: Sequence[RunRecord], paths: Sequence[Path | None] | None = None) -> list[RunRecord]:
    """Return copies of the records with `short_names`."""
    names = short_names(records, paths)
    return [msgspec.structs.replace(record, name=name) for record, name in zip(records, names, strict=True)]


def _by_settings(records: Sequence[RunRecord]) -> list[str]:
    """Return names made of settings; empty if settings do not distinguish all runs."""
    shared = set.intersection(*(set(record.overrides) for record in records)) if records else set()
    differing = [[setting for setting in record.overrides if setting not in shared] for record in records]
    if len(records) < 2 or len({tuple(settings) for settings in differing}) < len(records):
        return []
    keys = {setting.partition("=")[0] for settings in differing for setting in settings}
    return [", ".join(_last_part(setting, keys) for setting in settings) or "defaults" for settings in differing]


def _last_part(setting: str, keys: set[str]) -> str:
    """Return the setting with the shortest unique end of its key."""
    key, equals, value = setting.partition("=")
    parts = key.split(".")
    if key.startswith("~"):  # a deleted key
        return setting
    for count in range(1, len(parts)):
        short = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{short}") for other in keys) == 1:
            return f"{short}{equals}{value}"
    return setting.lstrip("+")


def _shortened(name: str) -> str:
    """Return the name, without its middle if it is too long.

    >>> _shortened("abc" * 20)
    'abcabcabcabcabcabca...abcabcabcabcabcabc'
    """
    half = (LONGEST_NAME - 3) // 2
    return name if len(name) <= LONGEST_NAME else f"{name[: half + 1]}...{name[-half:]}"
