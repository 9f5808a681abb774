"""What a run froze and what that saved, as numbers and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.table import Table


@dataclasses.dataclass(frozen=True)
class LayerModuleSavings:
    """One layer module in the savings table.

    Attributes:
        name: its path in the model.
        frozen_at_step: optimizer step after which it froze for the last time; None if it is active at the end.
        step_share: its forward and backward as a share of a step with nothing frozen; None if it was not measured.
    """

    name: str
    frozen_at_step: int | None
    step_share: float | None


@dataclasses.dataclass(frozen=True)
class Savings:
    """What freezing did to one `fit`.

    Attributes:
        layer_modules: front to back.
        frozen_depth: depth of the prefix at the end.
        step_seconds_before: mean seconds of a step before the first freeze; None if no such step was measured.
        step_seconds_after: mean seconds of a step at the final depth; None if nothing is frozen, or not measured.
        evaluation_seconds: what comparing with the reference model took of the training thread in all.
        seconds_saved: estimate: for each depth, the steps done there times the difference of the mean step times, less
            ``evaluation_seconds``. Negative where nothing was gained. None if it could not be measured.
        evaluations_done: evaluations that the policy saw.
        evaluations_late: evaluations that the reference had not answered when the answer was due.
        evaluations_dropped: evaluations that came to nothing for another reason.
        reference_precision: that the reference ran in last; None if it never answered.
        bytes_per_evaluation: what the last one sent to the reference; 0 if there was none.
        bytes_per_snapshot: size of the last snapshot of the weights.
        gradient_bytes_before: size of the gradients that a step exchanges with other processes, with nothing frozen;
            None if there is just one.
        gradient_bytes_after: the same at the final depth.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for a JSON file."""
        state = dataclasses.asdict(self)
        state["layer_modules"] = list(state["layer_modules"])
        return state


def savings_table(savings: Savings, metrics: Mapping[str, float]) -> Table:
    """The table that ends a run: per layer module when it froze and its share of the step, then the sums.

    Args:
        savings: of the run.
        metrics: last value of each logged metric by name; put below, because a speed-up says nothing without them.
    """
    table = Table(title="knowledge-guided freezing", title_justify="left", show_footer=False)
    table.add_column("layer module", overflow="fold")
    table.add_column("frozen at step", justify="right")
    table.add_column("share of step", justify="right")
    for layer_module in savings.layer_modules:
        frozen_at = "active" if layer_module.frozen_at_step is None else str(layer_module.frozen_at_step)
        share = "-" if layer_module.step_share is None else f"{layer_module.step_share:.1%}"
        table.add_row(layer_module.name, frozen_at, share)
    table.add_section()
    for label, text in _sums(savings):
        table.add_row(label, text, "")
    if metrics:
        table.add_section()
    for name, value in sorted(metrics.items()):
        table.add_row(name, f"{value:.4f}", "")
    return table


def _sums(savings: Savings) -> list[tuple[str, str]]:
    saved = savings.seconds_saved
    if savings.frozen_depth == 0 and (saved is None or saved <= 0):
        verdict = "nothing frozen"
    elif saved is None:
        verdict = "not measured"
    elif saved <= 0:
        verdict = f"nothing gained ({saved:.1f} s)"
    else:
        verdict = f"{saved:.1f} s"
    exchanged = []
    if savings.gradient_bytes_before is not None and savings.gradient_bytes_after is not None:
        sizes = _size(savings.gradient_bytes_before), _size(savings.gradient_bytes_after)
        exchanged = [("gradients exchanged in a step", f"{sizes[0]} -> {sizes[1]}")]
    return [
        ("frozen", f"{savings.frozen_depth}/{len(savings.layer_modules)}"),
        ("step before the first freeze", _milliseconds(savings.step_seconds_before)),
        ("step after the last freeze", _milliseconds(savings.step_seconds_after)),
        *exchanged,
        ("evaluations", f"{savings.evaluations_done} ({savings.evaluation_seconds:.1f} s)"),
        ("evaluations late, dropped", f"{savings.evaluations_late}, {savings.evaluations_dropped}"),
        ("reference", savings.reference_precision or "-"),
        ("sent for an evaluation", f"{savings.bytes_per_evaluation / 1e6:.1f} MB each"),
        ("sent for a new reference", f"{savings.bytes_per_snapshot / 1e6:.1f} MB each"),
        ("estimated time saved", verdict),
    ]


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
