"""The savings of a run, as numbers and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text


@dataclasses.dataclass(frozen=True)
class LayerModuleSavings:
    """One layer module in the savings table.

    Attributes:
        name: path in the model.
        frozen_at_step: optimizer step after which it froze last; None if it trained to the end.
        step_share: its forward and backward as a share of a step with nothing frozen; None if not measured.
    """

    name: str
    frozen_at_step: int | None
    step_share: float | None


@dataclasses.dataclass(frozen=True)
class Savings:
    """What freezing did in one `fit`.

    Attributes:
        layer_modules: one entry per layer module, front to back.
        frozen_depth: number of frozen layer modules at the end.
        step_seconds_before: median seconds of a step with nothing frozen; None if not measured.
        step_seconds_after: median seconds of a step at the final depth; None if nothing is frozen, or not measured.
        evaluation_seconds: seconds the training thread spent on evaluations and on a trial of depths.
        seconds_saved: estimate. For each depth, the number of steps times the difference of the median step times,
            minus ``evaluation_seconds``. Negative if freezing cost more than it saved; None if not measured.
        evaluations_done: evaluations that the policy saw.
        evaluations_late: evaluations without an answer when it was due.
        evaluations_dropped: evaluations dropped for another reason.
        reference_precision: precision of the reference at the end; None if it never answered.
        bytes_per_evaluation: bytes sent for the last evaluation; 0 if there was none.
        bytes_per_snapshot: bytes of the last snapshot of the weights; 0 if there was none.
        gradient_bytes_before: bytes of gradients that a step exchanges with nothing frozen; None with one process.
        gradient_bytes_after: bytes of gradients that a step exchanges at the final depth; None with one process.
        held_back: why the policy measured nothing; None if it did, or if something froze.
        points_lost_in_proof: the most that ``max_loss_points`` cost as set, on a task of the proof; None if another
            rule has set the depth.
    """

    layer_modules: tuple[LayerModuleSavings, ...]
    frozen_depth: int
    step_seconds_before: float | None
    step_seconds_after: float | None
    evaluation_seconds: float
    seconds_saved: float | None
    evaluations_done: int
    evaluations_late: int
    evaluations_dropped: int
    reference_precision: str | None
    bytes_per_evaluation: int
    bytes_per_snapshot: int
    gradient_bytes_before: int | None = None
    gradient_bytes_after: int | None = None
    held_back: str | None = None
    points_lost_in_proof: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the savings in plain types, for a JSON file."""
        state = dataclasses.asdict(self)
        state["layer_modules"] = list(state["layer_modules"])
        return state


def savings_table(savings: Savings, metrics: Mapping[str, float], details: bool = False) -> Table:
    """Return the table for the end of a run: one row per layer module, then totals, then metrics.

    Args:
        savings: savings of the run.
        metrics: last value of each logged metric, by name. A speed-up means nothing without them.
        details: also show late and dropped evaluations, and the data that evaluations and processes exchange.
    """
    table = Table(title="knowledge-guided freezing", title_justify="left", show_footer=False)
    table.add_column("layer module", overflow="fold")
    table.add_column("frozen at step", justify="right")
    table.add_column("share of step", justify="right")
    for layer_module in savings.layer_modules:
        frozen_at = "active" if layer_module.frozen_at_step is None else str(layer_module.frozen_at_step)
        share = "-" if layer_module.step_share is None else f"{layer_module.step_share:.1%}"
        table.add_row(Text(layer_module.name), frozen_at, share)
    table.add_section()
    for label, text in [*_sums(savings), *(_details(savings) if details else ())]:
        table.add_row(label, text, "")
    if metrics:
        table.add_section()
    for name, value in sorted(metrics.items()):
        table.add_row(Text(name), f"{value:.4f}", "")
    return table


def _sums(savings: Savings) -> list[tuple[str, str]]:
    saved = savings.seconds_saved
    if savings.frozen_depth == 0 and (saved is None or saved <= 0):
        verdict = "nothing frozen"
    elif saved is None:
        verdict = "not measured"
    elif saved <= 0:
        verdict = f"none ({saved:.1f} s)"
    else:
        verdict = f"{saved:.1f} s"
    lost = savings.evaluations_late + savings.evaluations_dropped
    done = f"{savings.evaluations_done} of {savings.evaluations_done + lost}" if lost else f"{savings.evaluations_done}"
    points = savings.points_lost_in_proof
    return [
        ("frozen", f"{savings.frozen_depth}/{len(savings.layer_modules)}"),
        ("step before the first freeze", _milliseconds(savings.step_seconds_before)),
        ("step after the last freeze", _milliseconds(savings.step_seconds_after)),
        ("evaluations", f"{done} ({savings.evaluation_seconds:.1f} s)"),
        ("estimated time saved", verdict),
        *([] if points is None else [("lost in the proof, at most", f"{points:g} points")]),
        *([] if points is None else [("to compare with", "freeze_until=0")]),
    ]


def _details(savings: Savings) -> list[tuple[str, str]]:
    rows = [
        ("evaluations late, dropped", f"{savings.evaluations_late}, {savings.evaluations_dropped}"),
        ("reference", savings.reference_precision or "-"),
        ("data per evaluation", f"{savings.bytes_per_evaluation / 1e6:.1f} MB"),
        ("data per reference", f"{savings.bytes_per_snapshot / 1e6:.1f} MB"),
    ]
    if savings.gradient_bytes_before is not None and savings.gradient_bytes_after is not None:
        sizes = _size(savings.gradient_bytes_before), _size(savings.gradient_bytes_after)
        rows.append(("gradients exchanged per step", f"{sizes[0]} -> {sizes[1]}"))
    return rows


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
