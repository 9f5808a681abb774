"""Tables and figures of the proof, from the files of the runs: for each workload and size, `table.md` beside them.

python -m benchmarks.proof.figures
"""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patheffects import Normal, Stroke
from scipy.stats import t as student

from benchmarks.proof.results import Run, costs_of, read_all
from benchmarks.proof.workloads import FROZEN, RESULTS, VARIATIONS, WORKLOADS

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURES = REPOSITORY / "docs" / "_static"
README = REPOSITORY / "README.md"
SUMMARY = re.compile(r"(<!-- make figures: summary -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
# Rows of the table in the README, by workload and size.
SUMMARIZED = {
    ("trashnet_efficientnet", "small"): "fine-tune EfficientNet-Lite0 on TrashNet, 6 epochs",
    ("cifar10_efficientnet", "small"): "fine-tune EfficientNet-Lite0 on 5,000 images of CIFAR-10, 4 epochs",
    ("banking77_minilm", "small"): "fine-tune MiniLM on 2,000 texts of Banking77, 4 epochs",
    ("camvid_efficientnet", "small"): "fine-tune EfficientNet-Lite0 with a new decoder on CamVid, 12 epochs, mIoU",
    ("cifar10_resnet20", "small"): "from scratch: ResNet-20 on CIFAR-10, step decay, 40 epochs",
    ("cifar10_mobilenetv2", "small"): "from scratch: MobileNetV2 on CIFAR-10, cosine, 16 epochs",
    ("multi30k_transformer", "small"): "from scratch: translation transformer, one cycle, 12 epochs, BLEU",
}
SUMMARY_METHODS = ("cached", "half", "shortened")
# Workloads with a picture of the first panel alone.
PICTURED = {("trashnet_efficientnet", "small"), ("cifar10_resnet20", "small")}
TITLES = {
    "plain": "plain",
    "shortened": "plain, shortened",
    "freezing": "freezing",
    "cached": "freezing and cache",
    "partial": "partial backprop",
    "partial shortened": "plain, as short as partial backprop",
    "partial smaller": "plain, batches as small",
    "slope": "SlopePolicy (Egeria)",
    "static": "static",
    "half": "half from the start",
    "deep": "three quarters from the start",
    "probe": "all but the head from the start",
    "lpft": "the head, then all (LP-FT)",
    "gradual": "gradual unfreezing (ULMFiT)",
    "linear": "linear (Composer)",
    "freezeout": "FreezeOut",
    "autofreeze": "AutoFreeze",
    "selective": "Selective-Backprop",
    "shortened_selective": "plain, as short as Selective-Backprop",
    "in_batch": "Selective-Backprop, in each batch",
    "selective_cached": "Selective-Backprop with freezing and cache",
    "random": "the same share at random",
    "importance": "importance sampling",
}
# The panels of a figure. Each has at most five lines: static runs are not made where other fixed depths are.
PANELS = {
    "freezing beside plain runs": ("plain", "cached", "freezing", "shortened"),
    "depths fixed in advance": ("plain", "cached", "half", "deep", "probe", "static"),
    "the head first": ("plain", "cached", "lpft", "gradual"),
    "rules of others": ("plain", "slope", "linear", "freezeout", "autofreeze"),
    "Selective-Backprop": ("plain", "selective", "in_batch", "shortened_selective", "selective_cached"),
    "other samples": ("plain", "selective", "random", "importance"),
    "partial backprop": ("plain", "partial", "partial shortened", "partial smaller"),
}
COLORS = {"plain": "#4a4a4a", "cached": "#c05621"}
OTHER_COLORS = ("#2b6cb0", "#2f855a", "#7b5ea7", "#d53f8c")  # of other methods, in the order of their panel
# Rows of the short table: what most readers ask for.
SHORT = ("plain", "shortened", "freezing", "cached", "half", "deep")


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean (Student's t); NaN for a single value.

    >>> round(interval([1.0, 2.0, 3.0]), 3)
    2.484
    """
    if len(values) < 2:
        return math.nan
    quantile = float(student.ppf(0.975, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def with_interval(values: Sequence[float], form: str) -> str:
    """Mean and confidence interval; the mean alone of a single value."""
    mean = format(statistics.fmean(values), form)
    return mean if len(values) < 2 else f"{mean} ± {interval(values):.1f}"


def time_to(runs: Sequence[Run], plain: Sequence[Run], part: float) -> str:
    """How many times sooner the runs reach a share of the final metric of the plain run of the same seed."""
    finals = {run.seed: run.final for run in plain}
    ours, theirs = [], []
    for run in runs:
        base = next((other for other in plain if other.seed == run.seed), None)
        if base is None:
            continue
        theirs.append(base.seconds_to(part * finals[run.seed]))
        ours.append(run.seconds_to(part * finals[run.seed]))
    came = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    if not came:
        return "never"
    gain = sum(b for _, b in came) / sum(a for a, _ in came)
    return f"{gain:.2f}x" if len(came) == len(ours) else f"{gain:.2f}x in {len(came)} of {len(ours)}"


def plain_by_then(runs: Sequence[Run], plain: Sequence[Run]) -> str:
    """Mean of what the plain runs of the same seeds had at their last validation within the time of the runs, and when.

    That is said as a share of their time, since a run may end long after the last validation that is counted.
    """
    values, shares = [], []
    for run in runs:
        for other in plain:
            points = [point for point in other.points if point.seconds <= run.seconds]
            if other.seed == run.seed and points:
                values.append(100 * points[-1].value)
                shares.append(points[-1].seconds / other.seconds)
    return f"{statistics.fmean(values):.1f} at {statistics.fmean(shares):.2f}" if values else "-"


def over(runs: Sequence[Run], others: Sequence[Run]) -> str:
    """Mean difference in points to other runs of the same seeds, with its confidence interval."""
    theirs = {run.seed: 100 * run.final for run in others}
    differences = [100 * run.final - theirs[run.seed] for run in runs if run.seed in theirs]
    return with_interval(differences, "+z.1f") if differences and runs != others else "-"


def made_by(runs: Sequence[Run], costs: Mapping[str, Any]) -> str:
    """In a sentence: by which versions the runs were made, and the costs measured."""
    abouts = [run.about for run in runs]
    named = {
        name: ", ".join(sorted({about.get(key, "unknown") for about in abouts}))
        for name, key in (("torch", "torch"), ("threads", "threads"), ("commits", "commit"))
    }
    return (
        f"Runs with torch {named['torch']}, threads: {named['threads']}, commits: {named['commits']}. Costs of steps "
        f"with torch {costs['about']['torch']}, threads: {costs['about']['threads']}, commit: "
        f"{costs['about'].get('commit', 'unknown')}."
    )


def titles_of(runs: Sequence[Run]) -> Mapping[str, str]:
    """The methods by name, those that freeze to a given depth last."""
    fixed = {run.method: match for run in runs if (match := FROZEN.fullmatch(run.method))}
    titles = dict(TITLES)
    for name, match in sorted(fixed.items(), key=lambda one: int(one[1]["depth"])):
        when = f"after {match['percent']} % of the run" if match["percent"] else "from the start"
        titles[name] = f"{match['depth']} {when}{', with the cache' if match['cached'] else ''}"
    return titles


def frozen_at_the_end(runs: Sequence[Run]) -> str:
    """Smallest and largest final depth over the seeds, and of how many layer modules."""
    modules = max(len(run.layer_modules) for run in runs)
    depths = [run.final_depth for run in runs]
    return f"{'-'.join(str(depth) for depth in sorted({min(depths), max(depths)}))} of {modules}" if modules else "-"


def table(runs: Sequence[Run], costs: Mapping[str, Any]) -> str:
    """Compare the methods of one workload, one row each, as Markdown."""
    plain, short = ([run for run in runs if run.method == method] for method in ("plain", "shortened"))
    base, raw = statistics.fmean(r.seconds for r in plain), statistics.fmean(r.points[-1].raw_seconds for r in plain)
    columns = ("method", "seeds", "final, %", "vs. plain", "vs. shortened", "training time", "evaluating")
    columns += ("plain by then, %", "by the clock", "to plain's final", "frozen")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for method, title in titles_of(runs).items():
        own = [run for run in runs if run.method == method]
        if not own:
            continue
        finals = [100 * run.final for run in own]
        rows.append(
            f"| {title} | {len(own)} | {with_interval(finals, '.1f')} "
            f"| {over(own, plain)} | {over(own, short)} "
            f"| {statistics.fmean(run.seconds for run in own) / base:.2f} "
            f"| {statistics.fmean(run.comparing for run in own) / base:.2f} | {plain_by_then(own, plain)} "
            f"| {statistics.fmean(run.points[-1].raw_seconds for run in own) / raw:.2f} "
            f"| {time_to(own, plain, 1.0)} | {frozen_at_the_end(own)} |"
        )
    note = f"Training time of the plain run: {base:.0f} s ({raw:.0f} s by the clock); the others are shares of it."
    return "\n".join([*rows, "", f"{note} {made_by(runs, costs)}", ""])


def short_table(runs: Sequence[Run]) -> str:
    """The methods that most readers ask for, in the columns that they read first."""
    plain = [run for run in runs if run.method == "plain"]
    base = statistics.fmean(run.seconds for run in plain)
    rows = ["| method | training time | final, % | vs. plain | frozen |", "|---|---|---|---|---|"]
    for method in SHORT:
        if own := [run for run in runs if run.method == method]:
            rows.append(
                f"| {TITLES[method]} | {statistics.fmean(run.seconds for run in own) / base:.2f} "
                f"| {with_interval([100 * run.final for run in own], '.1f')} | {over(own, plain)} "
                f"| {frozen_at_the_end(own)} |"
            )
    return "\n".join([*rows, ""])


def summary(runs: Mapping[str, Sequence[Run]]) -> str:
    """Time and final metric of freezing with the cache and of two controls, beside the plain run: for the README.

    Args:
        runs: of each workload by its title.
    """
    rows = ["| | freezing and cache | half frozen | plain, shortened |", "|---|---|---|---|"]
    for title, found in runs.items():
        of = {name: [run for run in found if run.method == name] for name in ("plain", *SUMMARY_METHODS)}
        base = statistics.fmean(run.seconds for run in of["plain"])
        cells = []
        for method in SUMMARY_METHODS:
            own = of[method]
            time = f"{statistics.fmean(run.seconds for run in own) / base:.2f}" if own else ""
            cells.append(f"**{time}** ({over(own, of['plain'])})" if own else "-")
        rows.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def readme_summary() -> str:
    """The table in the README. Each row names its workload, so that its command is known."""
    runs = {f"{title} (`{which[0]}`)": read_all(*which) for which, title in SUMMARIZED.items()}
    return "\n" + summary(runs) + "\n"


def sensitivity(runs: Sequence[Run]) -> str:
    """What one changed argument does, one row each, as Markdown; empty without such runs.

    The row of the defaults has the seeds that any of the others has.
    """
    plain = {run.seed: run for run in runs if run.method == "plain"}
    names = ["freezing", *(f"{argument}={value}" for argument, values in VARIATIONS.items() for value in values)]
    rows = [
        "| with | seeds | final, % | below plain | training time | frozen at the end |",
        "|---|---|---|---|---|---|",
    ]
    seeds = {run.seed for run in runs if run.method in names[1:]} & plain.keys()
    for name in names:
        own = [run for run in runs if run.method == name and run.seed in seeds]
        if not own:
            continue
        final = 100 * statistics.fmean(run.final for run in own)
        less = 100 * statistics.fmean(plain[run.seed].final for run in own) - final
        time = statistics.fmean(run.seconds / plain[run.seed].seconds for run in own)
        title = "the defaults" if name == "freezing" else f"`{name}`"
        rows.append(f"| {title} | {len(own)} | {final:.1f} | {less:+.1f} | {time:.2f} | {frozen_at_the_end(own)} |")
    return "\n".join([*rows, ""]) if len(rows) > 3 else ""


def inside(path: Path, frozen: Run | None) -> Figure:
    """How alike each layer module is to its final state over a plain run, and when it froze."""
    state = json.loads(path.read_text())
    names, seen = state["layer_modules"], state["likeness"]
    figure = Figure(figsize=(8, 1.2 + 0.22 * len(names)), layout="constrained")
    axes = figure.subplots()
    steps = [entry["step"] for entry in seen]
    cells = [[entry["cka"][index] for entry in seen] for index in range(len(names))]
    image = axes.imshow(cells, aspect="auto", cmap="viridis", vmin=0.5, vmax=1, extent=(0, steps[-1], len(names), 0))
    figure.colorbar(image, label="CKA to the end")
    for event in frozen.events if frozen is not None else ():
        if event["depth"]:
            line = axes.plot([event["step"]] * 2, [0, event["depth"]], color="#000000", linewidth=2)
            line[0].set_path_effects([Stroke(linewidth=4, foreground="#ffffff"), Normal()])
        else:
            axes.axvline(event["step"], color="#ff5555", linewidth=2)
    axes.set_yticks([index + 0.5 for index in range(len(names))], names, fontsize=7)
    axes.set_xlabel("optimizer steps; black: frozen from here on, red: unfrozen")
    return figure


def panels_of(runs: Sequence[Run]) -> Mapping[str, Sequence[str]]:
    """The methods of each panel: of the first one, and of those that show more than the lines that others repeat."""
    methods = {run.method for run in runs}
    panels = {title: [one for one in names if one in methods] for title, names in PANELS.items()}
    first = next(iter(PANELS))
    return {title: names for title, names in panels.items() if title == first or not {*names} <= COLORS.keys()}


def picture(runs: Sequence[Run], metric: str, most: int | None = None) -> Figure:
    """Metric over training time, mean and range over the seeds, and below it the frozen share: in panels.

    Args:
        runs: of one workload.
        metric: name of the metric.
        most: number of panels; None shows all.
    """
    mpl.rcParams["font.size"] = 9
    panels = dict(list(panels_of(runs).items())[:most])
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5 * columns if columns > 1 else 7, 4.2 * rows), layout="constrained")
    places = figure.subfigures(rows, columns, squeeze=False).flat
    values = sorted(point.value for run in runs for point in run.points)
    least = min(values[len(values) // 10], *(run.final for run in runs))  # the end of each line is seen
    margin = 0.04 * (values[-1] - least)
    longest = max(run.seconds for run in runs)
    for place, (title, methods) in zip(places, panels.items(), strict=False):
        shown = {method: [run for run in runs if run.method == method] for method in methods}
        above = _panel(place, title, shown)
        above.set_ylabel(metric)
        above.set_ylim(least - margin, values[-1] + margin)
        above.set_xlim(0, 1.03 * longest)
    return figure


def _panel(place: SubFigure, title: str, shown: Mapping[str, Sequence[Run]]) -> Axes:
    freezes = any(run.events for runs in shown.values() for run in runs)
    if freezes:
        above, below = place.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    else:
        above = below = place.subplots()
    # A method has one colour in this panel, whichever others were run.
    others = dict(zip((method for method in PANELS[title] if method not in COLORS), OTHER_COLORS, strict=False))
    for method, runs in shown.items():
        color = COLORS.get(method) or others[method]
        _draw_metric(above, runs, color, TITLES[method])
        if freezes:
            _draw_frozen(below, runs, color, 4 if method == "cached" else 1.5)  # seen under the same line without it
    if freezes:
        below.set_ylabel("frozen share")
        below.set_ylim(0, 1.05)
        below.set_yticks([0, 0.5, 1])
    below.set_xlabel("training time in seconds")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    above.set_title(title, loc="left", fontsize=10, fontweight="bold")
    is_wide = any(len(TITLES[method]) > 32 for method in shown)
    place.legend(loc="outside lower center", ncols=1 if is_wide else 2, fontsize=8, frameon=False)
    return above


def _draw_metric(axes: Axes, runs: Sequence[Run], color: str, title: str) -> None:
    # Runs that were made as short differ in length: all of them end with what they end with.
    shown = [*range(min(len(run.points) for run in runs) - 1), -1]
    times = [statistics.fmean(run.points[i].seconds for run in runs) for i in shown]
    values = [[run.points[i].value for run in runs] for i in shown]
    style = {"color": color, "linewidth": 1.5, "label": title, "marker": "o" if len(times) == 1 else None}
    axes.plot(times, [statistics.fmean(column) for column in values], **style)
    axes.fill_between(times, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.15, linewidth=0)


def _draw_frozen(axes: Axes, runs: Sequence[Run], color: str, width: float) -> None:
    run = sorted(runs, key=lambda one: one.seconds)[len(runs) // 2]  # as long as the line above, which is a mean
    if not run.layer_modules:
        return
    times, shares = [0.0], [0.0]
    for event in run.events:
        times.append(_seconds_at(run, event["step"]))
        shares.append(event["depth"] / len(run.layer_modules))
    axes.step([*times, run.seconds], [*shares, shares[-1]], where="post", color=color, linewidth=width)


def _seconds_at(run: Run, step: int) -> float:
    """Training time at a step, on the line between the validations around it."""
    before_step, before = 0, 0.0
    for point in run.points:
        if point.step >= step:
            return before + (point.seconds - before) * (step - before_step) / (point.step - before_step)
        before_step, before = point.step, point.seconds
    return before


def main() -> None:
    """Write all of them."""
    for workload, about in WORKLOADS.items():
        for folder in sorted(path for path in (RESULTS / workload).glob("*") if path.is_dir()):
            if not (folder / "costs.json").is_file():
                print(f"{workload} {folder.name}: not complete")
                continue
            runs = read_all(workload, folder.name)
            if not any(run.method == "plain" for run in runs):
                continue
            text = table(runs, costs_of(workload, folder.name))
            (folder / "table.md").write_text(text)
            (folder / "short.md").write_text(short_table(runs))
            if varied := sensitivity(runs):
                (folder / "sensitivity.md").write_text(varied)
            if (folder / "inside.json").is_file():
                frozen = next((run for run in runs if run.method == "freezing"), None)
                path = PICTURES / f"proof_{workload}_{folder.name}_inside.png"
                inside(folder / "inside.json", frozen).savefig(path, dpi=100, metadata={"Software": None})
            path = PICTURES / f"proof_{workload}_{folder.name}.png"
            picture(runs, about.metric).savefig(path, dpi=100, metadata={"Software": None})
            if (workload, folder.name) in PICTURED:
                first = picture(runs, about.metric, most=1)
                first.savefig(path.with_stem(f"{path.stem}_short"), dpi=100, metadata={"Software": None})
            print(f"{workload} {folder.name}: {len(runs)} runs, {path}\n{text}")
    README.write_text(SUMMARY.sub(lambda found: found[1] + readme_summary(), README.read_text()))


if __name__ == "__main__":
    main()
