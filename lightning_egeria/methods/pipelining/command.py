"""`egeria plan`: plan a graph pipeline, compare it with the best chain, print and draw both."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_egeria.core.programs.arguments import positive_number, whole_number
from lightning_egeria.core.programs.files import parsed_json, read_text, write_whole
from lightning_egeria.core.programs.terminal import printable, takes_json
from lightning_egeria.errors import ArgumentError, PlanError
from lightning_egeria.methods.pipelining.examples import EXAMPLES
from lightning_egeria.methods.pipelining.graph import ComputationGraph
from lightning_egeria.methods.pipelining.plan import Plan
from lightning_egeria.methods.pipelining.planner import Limits, plan_chain, plan_graph
from lightning_egeria.methods.pipelining.timeline import predict

_MOST = 4096  # devices, micro-batches, forwards in a row
_MOST_WORK = 2**22  # nodes x nodes x devices: half a minute
_LARGEST = 2**24  # bytes of a file


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    count = whole_number(1, _MOST)
    parser.add_argument("model", help=f"{', '.join(sorted(EXAMPLES))}, or a file with the JSON of a graph or a plan")
    parser.add_argument("--devices", type=count, metavar="N", required=True, help="number of devices")
    parser.add_argument("--micro-batches", type=count, metavar="N", help="parts of a batch; default: 2 x devices")
    parser.add_argument(
        "--memory-gb", type=positive_number(), metavar="N", help="memory of a device; default: no limit"
    )
    parser.add_argument(
        "--group", type=count, metavar="N", default=1, help="forward passes in a row (k of kFkB); default: 1"
    )
    parser.add_argument(
        "--max-width", type=count, metavar="N", help="largest number of devices of a stage; default: no limit"
    )
    parser.add_argument("--out", type=Path, help="folder for plan.json and timelines.png; default: nothing is written")
    takes_json(parser, "with the plan, and nothing else")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    limits = Limits(
        options.devices,
        options.micro_batches or 2 * options.devices,
        group=options.group,
        max_width=options.max_width,
        memory_bytes=int(options.memory_gb * 2**30) if options.memory_gb is not None else None,
    )
    graph = read_graph(options.model)
    if len(graph.nodes) ** 2 * limits.devices > _MOST_WORK:
        raise ArgumentError(
            f"planning {len(graph.nodes)} nodes on {limits.devices} devices would take minutes. Join nodes that run in "
            "a row, or plan for fewer devices"
        )
    plans = {"graph": plan_graph(graph, limits)}
    if options.json:
        print(plans["graph"].to_json())
        return 0
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
    print("a row is a rank; digits: forward pass of a micro-batch; letters: its backward pass; dots: idle")
    if "best chain" in plans:
        ratio = timelines["best chain"].seconds / timelines["graph"].seconds
        print(f"throughput of the graph over the chain: {ratio:.2f}")
    else:
        print("best chain: none fits into the memory")
    if options.out is not None:
        from lightning_egeria.methods.pipelining.drawing import timelines as drawn

        folder = options.out
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "plan.json", plans["graph"].to_json())
        stream = io.BytesIO()
        drawn(timelines).savefig(stream, format="png", dpi=150)
        write_whole(folder / "timelines.png", stream.getvalue())
        print(f"wrote plan.json and timelines.png to {folder}")
    return 0


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


def _ranks(plan: Plan, stage: int) -> str:
    ranks = plan.ranks(stage)
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _table(plan: Plan) -> Table:
    table = Table("stage", "ranks", "reads ranks", "forward", "backward", "in flight", "memory")
    for number, stage in enumerate(plan.stages):
        forward, backward = plan.seconds(number)
        table.add_row(
            Text(printable(stage.name)),
            _ranks(plan, number),
            ", ".join(_ranks(plan, other) for other in plan.inputs(number)),
            f"{forward * 1e3:.3g} ms",
            f"{backward * 1e3:.3g} ms",
            str(plan.in_flight[number]),
            f"{plan.memory_bytes(number) / 2**20:.0f} MiB",
        )
    return table
