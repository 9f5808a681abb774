"""What a run of knowledge-guided freezing reports at its end: the savings, their table, and why nothing froze.

Reports read the savings of old runs, so this imports neither torch nor Lightning before a run asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from lightning_egeria.core.training.freezer import FreezingEvent
    from lightning_egeria.freezing.decide import Decider


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
        why_nothing_froze: one or two sentences from `why_nothing_froze`; None if something froze, or nothing is known.
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
    why_nothing_froze: str | None = None
    points_lost_in_proof: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the savings in plain types, for a JSON file."""
        state = dataclasses.asdict(self)
        state["layer_modules"] = list(state["layer_modules"])
        return state


def summarize(decider: Decider, events: Sequence[FreezingEvent]) -> Savings:
    """Return the savings so far.

    Args:
        decider: decider of the run.
        events: every freeze and unfreeze of the run.
    """
    freezer, comparison = decider.freezer, decider.comparison
    costs, names = comparison.costs, freezer.chain.names
    shares = costs.layer_shares(len(names))
    modules = []
    for index, name in enumerate(names):
        frozen_at = None
        for event in events:
            frozen_at = (event.step if frozen_at is None else frozen_at) if event.depth > index else None
        modules.append(LayerModuleSavings(name, frozen_at, shares[index]))
    saved = costs.seconds_saved()
    depth = events[-1].depth if events else 0
    return Savings(
        layer_modules=tuple(modules),
        frozen_depth=depth,
        step_seconds_before=costs.median_seconds(0),
        step_seconds_after=costs.median_seconds(depth) if depth else None,
        evaluation_seconds=costs.evaluation_seconds,
        seconds_saved=None if saved is None else saved - costs.evaluation_seconds,
        evaluations_done=comparison.evaluations.counts.done,
        evaluations_late=comparison.evaluations.counts.late,
        evaluations_dropped=comparison.evaluations.counts.dropped,
        reference_precision=comparison.evaluations.precision,
        bytes_per_evaluation=comparison.runner.evaluation_bytes,
        bytes_per_snapshot=comparison.runner.snapshot_bytes,
        gradient_bytes_before=freezer.prefix.gradient_bytes(0) if freezer.ranks.several else None,
        gradient_bytes_after=freezer.prefix.gradient_bytes(depth) if freezer.ranks.several else None,
        why_nothing_froze=why_nothing_froze(decider) if not events else None,
        points_lost_in_proof=decider.points_lost_in_proof if depth else None,
    )


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


def share_of_step(decider: Decider, depth: int) -> float | None:
    """Return the first ``depth`` layer modules' share of a step with nothing frozen; None if not measured."""
    values = decider.comparison.costs.layer_shares(len(decider.freezer.chain))[:depth]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def why_nothing_froze(decider: Decider) -> str | None:
    """Return why the run froze nothing, and what to do, for the log and the report.

    Args:
        decider: decider of a run without a freeze.

    Returns:
        A clause and what to do, without a full stop at the end; None on every rank but 0, and for a policy that asked
        for no freeze.
    """
    policy, queue, trial = decider.policy, decider.comparison.evaluations, decider.trial
    every, counts = decider.comparison.evaluate_every_n_steps, queue.counts
    lost = counts.late + counts.dropped
    evaluations = lost + counts.failed + counts.done
    if not decider.freezer.ranks.leads:
        return None
    if decider.max_depth == 0:
        return "no layer module may freeze, because of freeze_until or of weights that several layers share"
    if trial is not None and not trial.over:
        return "the run ended before depths could be tried. Train longer, or pass FreezingPolicy(trial=False)"
    if decider.declined is not None:
        return decider.declined
    if (held_back := getattr(policy, "held_back", None)) is not None:
        return (
            f"{held_back}. A model trained from scratch freezes only after its learning rate has dropped to half its "
            "peak. Use a decaying schedule, or FreezingPolicy(pretrained=True) if you fine-tune trained weights"
        )
    from lightning_egeria.freezing.slopes import SlopePolicy, Stage  # which imports torch

    if isinstance(policy, SlopePolicy) and policy.stage is Stage.BOOTSTRAP:
        return (
            "the training loss has not settled, and SlopePolicy waits for that. Train longer, or pass bootstrap=False"
        )
    if queue.stopped or counts.failed > counts.done:
        return f"the reference model failed in {counts.failed} of {evaluations} evaluations. A warning has the error"
    if not policy.wants_reference:
        return None
    if evaluations == 0:
        return f"the run ended before the first evaluation, after {every} steps. Lower evaluate_every_n_steps"
    if lost > counts.done and counts.late:
        return (
            f"{lost} of {evaluations} evaluations came late or were dropped. Leave a core idle for the reference "
            "model, raise evaluate_every_n_steps, or set background=False"
        )
    if lost > counts.done:
        return f"{lost} of {evaluations} evaluations were dropped. A warning says why"
    return (
        f"in {counts.done} evaluations, no layer module stayed below the tolerance for long enough. Train longer, or "
        "raise the tolerance"
    )
