"""`egeria report`: figures of one or more runs, on one page and as files."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lightning_egeria.core.programs.files import write_whole
from lightning_egeria.core.programs.terminal import printable, takes_json, tell
from lightning_egeria.errors import RecordError
from lightning_egeria.report.comparison import summary_of, summary_table, why_nothing_froze
from lightning_egeria.report.naming import with_short_names
from lightning_egeria.report.record import FILE_NAME, RunRecord


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run_dir", nargs="+", type=Path, help=f"directory with {FILE_NAME} in or below it")
    parser.add_argument("--out", type=Path, help="directory to write to; default: report/ in the last run's directory")
    parser.add_argument("--metric", help="logged metric to compare runs by; default: an accuracy")
    takes_json(parser, "for each run, and draw nothing")
    parser.description = (
        "Draw the freezes, times and metrics of runs: one self-contained report.html,\nand PNGs. "
        "The other runs are compared with the first one, so name the plain run first."
    )
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    found = [path for folder in options.run_dir for path in _records_below(folder)]
    records = with_short_names([RunRecord.read(path) for path in found], found)
    if options.json:
        tell(options, map(summary_of, records), [])
        return 0
    out = options.out or _beside(found[-1])
    try:
        count = write_report(records, out, options.metric)
    except OSError as error:
        raise RecordError(
            f"cannot write to {out}: {error.strerror or error}. Choose another directory with --out"
        ) from error
    Console().print(summary_table(records, options.metric))
    for record in records:
        if (reason := why_nothing_froze(record)) is not None:
            print(f"{printable(record.name)}: nothing froze. {printable(reason)}")
    print(f"wrote {printable(out / 'report.html')} and {count} pictures")
    return 0


def write_report(records: Sequence[RunRecord], out: Path, metric: str | None = None) -> int:
    """Write ``report.html`` and its pictures; return the number of pictures.

    Args:
        records: records of the runs; the others are compared with the first.
        out: directory to write to.
        metric: logged metric to compare runs by; None takes one that all runs have.

    Raises:
        RecordError: if the runs have no such metric in common.
        ModuleNotFoundError: if matplotlib is not installed.
        OSError: if ``out`` cannot be written to.
    """
    # matplotlib takes a second to import, and may be missing
    from lightning_egeria.report.drawing import figures_of
    from lightning_egeria.report.page import page

    drawn = figures_of(records, metric)
    text = page(records, drawn, metric)
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=150)
        write_whole(out / f"{name}.png", stream.getvalue())
    write_whole(out / "report.html", text.encode(errors="replace"))
    return len(drawn)


def _beside(record: Path) -> Path:
    """Return the folder for a report in that of a run.

    Raises:
        RecordError: it is a link. One that came with the run may lead anywhere.
    """
    out = record.parent / "report"
    if out.is_symlink():
        raise RecordError(f"{out} is a link. Name the directory to write to with --out")
    return out


def _records_below(folder: Path) -> list[Path]:
    if (folder / FILE_NAME).is_file():
        return [folder / FILE_NAME]
    if folder.is_file():
        return [folder]
    found = sorted(path for path in folder.rglob(FILE_NAME) if path.is_file())
    if not found:
        raise RecordError(
            f"no {FILE_NAME} in or below {folder}. Add RunRecorder() to the Trainer's callbacks; egeria-train has it "
            "already"
        )
    return found
