"""What the searches of a run have come to: lines at its end, and the figures of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_egeria.core.training.panels import Panel
from lightning_egeria.methods.tuning.record import SearchRecord, describe

MOST_ROWS = 30  # of the tree of branches


def closing_lines(searches: Sequence[SearchRecord], seconds: float) -> Iterator[str]:
    """Yield what the searches found and cost, a line for each and one for all.

    Args:
        searches: of the run.
        seconds: time that the run took.
    """
    if not searches:
        yield "no search ran: none was due (at_epochs, monitor), or the budget was too small (see above)"
        return
    steps, spent = sum(one.steps for one in searches), sum(one.seconds for one in searches)
    share = f" ({spent / seconds:.0%} of the run)" if seconds > 0 else ""
    yield f"{_count(len(searches), 'search', 'searches')} took {steps} steps and {spent:.1f} s{share}"
    for one in searches:
        found = "no setting made progress" if one.winner is None else f"{describe(one.setting)} won"
        failed = sum(branch["label"] in ("failed", "diverged") for branch in one.branches)
        tried = _count(len(one.branches), "setting", "settings")
        yield (
            f"step {one.step}: {tried}, {failed} of which diverged or failed, {one.steps} steps, {one.seconds:.1f} s: "
            f"{found}"
        )


def panels_of_searches(searches: Sequence[SearchRecord]) -> list[Panel]:
    """Return the tree of branches, their speeds, and the time that each search took.

    Args:
        searches: of the run. Of many branches, the winners and the fastest are in the tree.
    """
    rows = [
        (one.winner == number, branch["speed"] or 0.0, place, number)
        for place, one in enumerate(searches)
        for number, branch in enumerate(one.branches)
    ]
    shown = {(place, number) for _, _, place, number in sorted(rows, reverse=True)[:MOST_ROWS]}
    tree: dict[str, list[tuple[float, float]]] = {}
    for _, _, place, number in rows:
        if (place, number) in shown:
            one = searches[place]
            tree[_name(one, number)] = [(one.step, one.step + one.branches[number]["steps"])]
    speeds: dict[str, list[tuple[float, float]]] = {
        f"search at step {one.step}": [(number, branch["speed"] or 0.0) for number, branch in enumerate(one.branches)]
        for one in searches
    }
    times: list[tuple[float, float]] = [(one.step, one.seconds) for one in searches]
    return [
        Panel(
            "tuning_branches",
            "Branches",
            "Each row is a branch of a search: where it began, and the steps that it trained. Training continued from "
            "the end of the winners.",
            "optimizer steps",
            "branch",
            tree,
            kind="spans",
        ),
        Panel(
            "tuning_speeds",
            "Speeds of the branches",
            "Decrease of the loss in a step, or in a second. 0 is no progress.",
            "number of the branch",
            "speed",
            speeds,
            kind="bars",
        ),
        Panel(
            "tuning_seconds",
            "Time spent searching",
            "Seconds of each search, the steps of the winner included.",
            "optimizer steps before the search",
            "s",
            {"seconds": times},
            kind="bars",
        ),
    ]


def _name(one: SearchRecord, number: int) -> str:
    branch = one.branches[number]
    marks = ["won"] if one.winner == number else [branch["label"]] if branch["label"] in ("failed", "diverged") else []
    return " ".join([f"{one.step}/{number}: {describe(branch['setting'])}", *(f"({mark})" for mark in marks)])


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
