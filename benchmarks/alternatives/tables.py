"""A table and a figure of each task, from the lines that its runs have added.

python -m benchmarks.alternatives.tables
"""

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.alternatives.methods import METHODS
from benchmarks.alternatives.run import RESULTS, chosen_rate, final, results
from benchmarks.alternatives.tasks import TASKS
from benchmarks.proof.figures import PICTURES, README, interval, with_interval

Runs = Mapping[int, Mapping[str, Any]]
# At most five lines in a panel; a plain run is in each.
PANELS = {
    "one network, more or less of it": ("plain", "shortened", "half_cached", "ours_tuned"),
    "the head first": ("plain", "backbone_finetuning", "lp_ft", "gradual", "linear_probe"),
    "adapters": ("plain", "lora", "lora_third", "lora_third_cached"),
}
SHORT_TITLES = {
    "plain": "plain",
    "shortened": "plain, shortened",
    "backbone_finetuning": "BackboneFinetuning",
    "lp_ft": "LP-FT",
    "gradual": "gradual",
    "linear_probe": "linear probe",
    "lora": "LoRA",
    "lora_third": "LoRA, last third",
    "lora_third_cached": "LoRA, last third, cached",
    "half_cached": "half frozen, cached",
    "ours_tuned": "ours",
}
# Rows and columns of the table in the README.
SUMMARY_METHODS = (
    "plain",
    "shortened",
    "backbone_finetuning",
    "linear_probe",
    "lora_third",
    "by_hand",
    "ours",
    "ours_tuned",
)
SUMMARY_TASKS = {
    "trashnet": "EfficientNet-Lite0 on TrashNet",
    "imagenette": "the same on Imagenette",
    "banking77": "MiniLM on Banking77",
}
SUMMARY = re.compile(r"(<!-- benchmarks.alternatives.tables -->\n)(.*?)(?=<!-- end of it -->)", re.DOTALL)
COLORS, COLOR_OF_OURS = ("#4a4a4a", "#2b6cb0", "#2f855a", "#7b5ea7", "#d53f8c"), "#c05621"


def spread(values: Sequence[float], form: str) -> str:
    """Mean, with an interval from three values on: an interval of two values says nothing."""
    return with_interval(values, form) if len(values) > 2 else format(statistics.fmean(values), form)


def runs_of(task: str) -> dict[str, Runs]:
    """The figures of each method that has all its seeds."""
    kept = results(task)
    found = {method: final(task, method, kept) for method in METHODS}
    return {method: runs for method, runs in found.items() if runs}


def median(runs: Runs, name: str) -> float:
    return statistics.median(one[name] for one in runs.values())


def quiet(runs: Runs) -> Runs:
    """Those whose times count: beside the others, the machine did something else."""
    return {seed: one for seed, one in runs.items() if one.get("quiet", True)} or runs


def table(task: str, runs: Mapping[str, Runs]) -> str:
    """Markdown, with the methods in the order of their time."""
    kept, plain = results(task), runs["plain"]
    rows = [
        "| method | accuracy, % | vs. plain | CPU seconds | of plain | memory, MiB | lines | depth | rate |",
        "|---|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    whole = median(quiet(plain), "cpu_seconds")
    for method, ones in sorted(runs.items(), key=lambda item: median(quiet(item[1]), "cpu_seconds")):
        values = [100 * one["accuracy"] for one in ones.values()]
        over = [100 * (one["accuracy"] - plain[seed]["accuracy"]) for seed, one in ones.items() if seed in plain]
        seconds = median(quiet(ones), "cpu_seconds")
        cells = (
            METHODS[method].title,
            spread(values, ".1f"),
            "-" if method == "plain" else spread(over, "+.1f"),
            f"{seconds:.0f}",
            f"{seconds / whole:.2f}",
            f"{median(ones, 'peak_memory_mib'):.0f}",
            f"{METHODS[method].lines}",
            "known" if METHODS[method].depth else "-",
            f"{chosen_rate(task, method, kept):g}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    about = next(iter(plain.values()))["about"]
    commits = ", ".join(sorted({one["about"]["commit"] for ones in runs.values() for one in ones.values()}))
    counts = sorted({len(ones) for ones in runs.values()})
    of = " to ".join(map(str, sorted({counts[0], counts[-1]})))
    rows.append(
        f"\n{of} seeds; medians of seconds, means of accuracy with a 95 % interval. Made by `python -m "
        f"benchmarks.alternatives.run {task} --data FOLDER`, commit {commits}, on {about['cores_allowed']} core, torch "
        f"{about['torch']}, lightning {about['lightning']}."
    )
    return "\n".join(rows) + "\n"


def summary() -> str:
    """For the README: share of the plain run's time, and accuracy, of what most readers would do."""
    rows = [f"| | {' | '.join(SUMMARY_TASKS.values())} |", "|---" * (len(SUMMARY_TASKS) + 1) + "|"]
    found = {task: runs_of(task) for task in SUMMARY_TASKS}
    for method in SUMMARY_METHODS:
        cells = []
        for runs in found.values():
            if method not in runs:
                cells.append("-")
                continue
            time = median(quiet(runs[method]), "cpu_seconds") / median(quiet(runs["plain"]), "cpu_seconds")
            accuracy = spread([100 * one["accuracy"] for one in runs[method].values()], ".1f")
            cells.append(f"**{time:.2f}**, {accuracy} %")
        rows.append(f"| {METHODS[method].title} | {' | '.join(cells)} |")
    return "\n" + "\n".join(rows) + "\n\n"


def mean_curve(runs: Runs) -> tuple[list[float], list[float]]:
    """Mean seconds and accuracy at each validation."""
    points, timed = ([one["points"] for one in ones.values()] for ones in (runs, quiet(runs)))
    shared = min(map(len, points))
    seconds = [statistics.fmean(one[index]["cpu_seconds"] for one in timed) for index in range(shared)]
    accuracies = [100 * statistics.fmean(one[index]["accuracy"] for one in points) for index in range(shared)]
    return seconds, accuracies


def draw(axes: Axes, title: str, shown: Sequence[tuple[str, Runs]]) -> None:
    """One panel. The lowest tenth of the values is cut off where no line ends in it: the ends are what is compared."""
    curves = []
    for color, (method, runs) in zip(COLORS, shown, strict=False):
        seconds, accuracies = mean_curve(runs)
        ours = method == "ours_tuned"
        color = COLOR_OF_OURS if ours else color
        style = {"linewidth": 2.2 if ours else 1.4, "marker": "o", "markersize": 3, "label": SHORT_TITLES[method]}
        axes.plot(seconds, accuracies, color=color, **style)
        half = interval([100 * one["accuracy"] for one in runs.values()])
        if len(runs) > 2:
            axes.errorbar(seconds[-1], accuracies[-1], half, color=color, capsize=2, alpha=0.5)
        curves.append(accuracies)
    values = sorted(itertools.chain(*curves))
    axes.set_ylim(bottom=min(values[len(values) // 10], *(curve[-1] for curve in curves)) - 0.04 * values[-1])
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlim(left=0)
    axes.set_xlabel("CPU seconds of the whole fit, one core", fontsize=8)
    axes.set_ylabel("accuracy, %", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def picture(runs: Mapping[str, Runs]) -> Figure:
    """Accuracy over time, in panels of at most five lines."""
    panels = {
        title: [(method, runs[method]) for method in methods if method in runs] for title, methods in PANELS.items()
    }
    panels = {title: shown for title, shown in panels.items() if len(shown) > 1}
    figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained", facecolor="white")
    places = figure.subfigures(1, len(panels), squeeze=False).flat
    for place, (title, shown) in zip(places, panels.items(), strict=True):
        draw(place.subplots(), title, shown)
        place.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def main() -> None:
    """Write all of them."""
    for task in TASKS:
        runs = runs_of(task)
        if "plain" not in runs:
            continue
        Path(RESULTS / f"{task}.md").write_text(table(task, runs))
        picture(runs).savefig(PICTURES / f"alternatives_{task}.png", dpi=130, metadata={"Software": None})
        print(table(task, runs))
    README.write_text(SUMMARY.sub(lambda found: found[1] + summary(), README.read_text()))


if __name__ == "__main__":
    main()
