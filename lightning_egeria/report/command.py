"""`egeria-report`: pictures of one or more runs, on one page and as files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_egeria.errors import EgeriaError, RecordError
from lightning_egeria.report import figures
from lightning_egeria.report.record import FILE_NAME, RunRecord


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="egeria-report",
        description="Draw what runs have frozen and saved: report.html, which needs no other file, and PNGs. With "
        "several runs the first is what the others are compared with: give the plain run first.",
    )
    parser.add_argument("run_dir", nargs="+", type=Path, help=f"directory in which, or below which, {FILE_NAME} lies")
    parser.add_argument("--out", type=Path, help="directory to write to; default: report/ in the last run's directory")
    parser.add_argument("--metric", help="logged metric to compare runs by; default: an accuracy")
    options = parser.parse_args(arguments)
    try:
        found = [path for folder in options.run_dir for path in _records_below(folder)]
        records = _told_apart([RunRecord.read(path) for path in found], found)
        drawn = figures(records, options.metric)
        from lightning_egeria.report.page import page  # matplotlib may be missing: `figures` says so first

        text = page(records, drawn, options.metric)
    except EgeriaError as error:
        print(f"egeria-report: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("egeria-report: matplotlib is needed: pip install 'lightning-egeria[report]'", file=sys.stderr)
        return 2
    out = options.out or found[-1].parent / "report"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, figure in drawn.items():
            figure.savefig(out / f"{name}.png", dpi=150)
        (out / "report.html").write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        print(
            f"egeria-report: nothing can be written to {out}: {error.strerror or error}; choose another directory with "
            "--out",
            file=sys.stderr,
        )
        return 2
    print(f"{out / 'report.html'} and {len(drawn)} pictures beside it")
    return 0


def _records_below(folder: Path) -> list[Path]:
    if (folder / FILE_NAME).is_file():
        return [folder / FILE_NAME]
    if folder.is_file():
        return [folder]
    found = sorted(folder.rglob(FILE_NAME))
    if not found:
        raise RecordError(
            f"there is no {FILE_NAME} in {folder}, nor below it. It is written by RunRecorder(), among the callbacks "
            "of the Trainer; egeria-train has it"
        )
    return found


def _told_apart(records: list[RunRecord], paths: list[Path]) -> list[RunRecord]:
    """Runs of one name get that of their directory too."""
    names = [record.name for record in records]
    for record, path in zip(records, paths, strict=True):
        if names.count(record.name) > 1:
            record.name = "/".join(path.resolve().parent.parts[-2:])
    return records


if __name__ == "__main__":
    sys.exit(main())
