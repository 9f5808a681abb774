"""`egeria-plan`: plan a graph pipeline, compare it with the best chain, print and draw both."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_egeria.errors import ArgumentError, EgeriaError, PlanError
from lightning_egeria.pipelining.examples import EXAMPLES
from lightning_egeria.pipelining.graph import ComputationGraph
from lightning_egeria.pipelining.plan import Plan
from lightning_egeria.pipelining.planner import Limits, plan_chain, plan_graph
from lightning_egeria.pipelining.timeline import predict
from lightning_egeria.programs.files import parsed_json, read_text, write_whole
from lightning_egeria.programs.terminal import printable

USAGE = f"""egeria-plan model=NAME devices=NUMBER [key=value ...]

model          {", ".join(sorted(EXAMPLES))}, or the JSON of a graph or a plan
devices        number of devices
micro_batches  parts of a batch; default: 2 x devices
memory_gb      memory of a device; default: no limit
group          forwards in a row (k of kFkB); default: 1
max_width      devices of one stage, at most; default: no limit
out            folder for plan.json and timelines.png; default: none is written"""
_NUMBERS = ("devices", "micro_batches", "group", "max_width")
_MOST = 4096  # of each of these
_MOST_WORK = 2**22  # nodes x nodes x devices: half a minute
_LARGEST = 2**24  # bytes of a file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or {"-h", "--help"} & set(given):
        print(USAGE)
        return 0
    try:
        _plan(given)
    except EgeriaError as error:
        print(f"egeria-plan: {printable(error)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        print("egeria-plan needs matplotlib for pictures: pip install 'lightning-egeria[report]'", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"egeria-plan: {printable(f'{error.filename}: {error.strerror or error}')}", file=sys.stderr)
        return 2
    return 0


def _plan(given: Sequence[str]) -> None:
    known = ("model", *_NUMBERS, "memory_gb", "out")
    settings: dict[str, str] = {}
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals or key not in known:
            raise ArgumentError(f"expected key=value with a key of {', '.join(known)}, got {setting!r}")
        if key in settings:
            raise ArgumentError(f"{key} is given twice, {settings[key]!r} and {value!r}. Keep one")
        settings[key] = value
    if not {"model", "devices"} <= settings.keys():
        raise ArgumentError("model=... and devices=... must be given")
    numbers = {key: _number(key, settings[key]) for key in _NUMBERS if key in settings}
    numbers.setdefault("micro_batches", 2 * numbers["devices"])
    memory = int(_positive("memory_gb", settings["memory_gb"]) * 2**30) if "memory_gb" in settings else None
    limits = Limits(**numbers, memory_bytes=memory)
    graph = read_graph(settings["model"])
    if len(graph.nodes) ** 2 * limits.devices > _MOST_WORK:
        raise ArgumentError(
            f"planning {len(graph.nodes)} nodes on {limits.devices} devices would take minutes. Join nodes that run in "
            "a row, or plan for fewer devices"
        )
    plans = {"graph": plan_graph(graph, limits)}
    with contextlib.suppress(PlanError):  # no chain fits into memory
        plans["best chain"] = plan_chain(graph, limits)
    console = Console()
    console.print(_table(plans["graph"]))
    timelines = {name: predict(plan) for name, plan in plans.items()}
    for name, plan in plans.items():
        timeline = timelines[name]
        print(
            f"{name}: {timeline.seconds * 1e3:.3g} ms a step, slowest stage {plan.bottleneck_s * 1e3:.3g} ms a "
            f"micro-batch, in flight {max(plan.in_flight)}, idle {timeline.idle_share:.0%}"
        )
        print(timeline.text(min(100, console.width)))
    if "best chain" in plans:
        ratio = timelines["best chain"].seconds / timelines["graph"].seconds
        print(f"throughput of the graph over the chain: {ratio:.2f}")
    else:
        print("best chain: none fits into the memory")
    if "out" in settings:
        from lightning_egeria.pipelining.drawing import timelines as drawn

        folder = Path(settings["out"])
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "plan.json", plans["graph"].to_json())
        stream = io.BytesIO()
        drawn(timelines).savefig(stream, format="png", dpi=150)
        write_whole(folder / "timelines.png", stream.getvalue())
        print(f"wrote plan.json and timelines.png to {folder}")


def read_graph(model: str) -> ComputationGraph:
    """Return a graph by the name of an example or from a file of JSON.

    Raises:
        ArgumentError: if there is neither.
        PlanError: if the file is damaged.
    """
    if model in EXAMPLES:
        return EXAMPLES[model]()
    if not Path(model).is_file():
        raise ArgumentError(f"model must be one of {', '.join(sorted(EXAMPLES))} or a file of JSON, got {model!r}")
    try:
        text = read_text(Path(model), _LARGEST)
        state = parsed_json(text)
    except ValueError as error:
        raise ArgumentError(f"{model} is not JSON: {error}") from error
    if isinstance(state, dict) and "graph" in state:
        return Plan.from_json(text).graph
    return ComputationGraph.from_state(state)


def _number(key: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ArgumentError(f"{key} must be a whole number, got {value!r}") from None
    if number > _MOST:
        raise ArgumentError(f"{key} must be at most {_MOST}, got {value!r:.40}")
    return number


def _positive(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 2**30:
        raise ArgumentError(f"{key} must be a positive number, got {value!r}")
    return number


def _table(plan: Plan) -> Table:
    table = Table("stage", "ranks", "reads", "forward", "backward", "in flight", "memory")
    for number, stage in enumerate(plan.stages):
        ranks, (forward, backward) = plan.ranks(number), plan.seconds(number)
        table.add_row(
            Text(printable(stage.name)),
            str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}",
            Text(printable(", ".join(plan.stages[other].name for other in plan.inputs(number)))),
            f"{forward * 1e3:.3g} ms",
            f"{backward * 1e3:.3g} ms",
            str(plan.in_flight[number]),
            f"{plan.memory_bytes(number) / 2**20:.0f} MiB",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
