"""`egeria simulate`: run a workload under cluster policies and compare them."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_egeria.cluster.example import write_example
from lightning_egeria.cluster.jobs import Cluster
from lightning_egeria.cluster.policies import POLICIES
from lightning_egeria.cluster.records import Record
from lightning_egeria.cluster.simulator import simulate
from lightning_egeria.cluster.traces import read_applications
from lightning_egeria.cluster.workloads import read_workload
from lightning_egeria.core.programs.arguments import whole_number
from lightning_egeria.core.programs.files import write_whole
from lightning_egeria.core.programs.terminal import takes_json, tell
from lightning_egeria.errors import ArgumentError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "workload", nargs="?", type=Path, help="CSV: name,time,application,num_replicas,batch_size; see --example"
    )
    names = sorted(POLICIES)
    parser.add_argument(
        "--policy",
        nargs="+",
        choices=names,
        default=["pollux"],
        metavar="NAME",
        help=f"{', '.join(names)}; default: pollux",
    )
    parser.add_argument(
        "--traces", type=Path, help="folder of traces; default: traces/ beside the workload, or one folder above"
    )
    parser.add_argument(
        "--nodes", type=whole_number(1, 100_000), metavar="N", default=16, help="number of nodes; default: 16"
    )
    parser.add_argument(
        "--devices", type=whole_number(1, 1000), metavar="N", default=4, help="devices of a node; default: 4"
    )
    parser.add_argument(
        "--interval", type=float, metavar="N", default=60, help="seconds between two decisions; default: 60"
    )
    parser.add_argument("--out", type=Path, default=Path("simulation"), help="folder to write to; default: simulation")
    takes_json(parser, "for each policy, and draw nothing")
    parser.add_argument("--example", type=Path, metavar="FOLDER", help="only write a small workload and its traces")
    parser.add_argument(
        "--jobs", type=whole_number(1, 1_000_000), metavar="N", default=40, help="jobs of the example; default: 40"
    )
    parser.add_argument("--seed", type=whole_number(), metavar="N", default=0, help="seed of the example; default: 0")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.example is not None:
        print(f"wrote {write_example(options.example, options.jobs, seed=options.seed)} and traces/ beside it")
    elif options.workload is None:
        raise ArgumentError("name a workload, or write one with --example FOLDER")
    else:
        _simulate(options)
    return 0


def _simulate(options: argparse.Namespace) -> None:
    if not options.json:
        # matplotlib takes a second to import, and may be missing: better before the simulation than after it
        from lightning_egeria.cluster import drawing

    workload = read_workload(options.workload)
    beside, above = (folder / "traces" for folder in list(options.workload.resolve().parents)[:2])
    traces = options.traces or (beside if beside.is_dir() else above)
    applications = read_applications(traces, sorted({job.application for job in workload}))
    cluster = Cluster.of(options.nodes, options.devices)
    options.out.mkdir(parents=True, exist_ok=True)
    records = []
    for name in dict.fromkeys(options.policy):
        print(f"{name}: {len(workload)} jobs on {cluster.devices} devices", file=sys.stderr, flush=True)
        records.append(simulate(workload, applications, cluster, POLICIES[name](), options.interval))
        records[-1].write(options.out / f"{name}.jsonl")
        if not options.json:
            _draw(drawing.devices(records[-1]), options.out / f"devices-{name}.png")
    if options.json:
        tell(options, map(_summary, records), [])
        return
    _draw(drawing.completion_times(records), options.out / "completion-times.png")
    _draw(drawing.utilisation(records), options.out / "utilisation.png")
    Console().print(_table(records))
    print(f"wrote logs and pictures to {options.out}")


def _draw(figure: Any, path: Path) -> None:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=150)
    write_whole(path, stream.getvalue())


def _summary(record: Record) -> dict[str, Any]:
    restarts: dict[str, int] = {}
    for interval in record.intervals:
        restarts |= {name: job.restarts for name, job in interval.jobs.items()}
    return {
        "policy": record.policy,
        "average_completion_s": record.average_completion_s,
        "longest_s": max(record.completion_times.values()),
        "makespan_s": record.makespan_s,
        "utilisation": record.utilisation,
        "restarts": sum(restarts.values()),
    }


def _table(records: Sequence[Record]) -> Table:
    table = Table("policy", "average completion", "longest", "makespan", "utilisation", "restarts")
    for found in map(_summary, records):
        table.add_row(
            found["policy"],
            *(f"{found[name]:.0f} s" for name in ("average_completion_s", "longest_s", "makespan_s")),
            f"{found['utilisation']:.0%}",
            str(found["restarts"]),
        )
    return table
