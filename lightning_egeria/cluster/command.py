"""`egeria-cluster`: run a workload under cluster policies and compare them, or run real jobs under one."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_egeria.cluster.example import write_example
from lightning_egeria.cluster.job_files import read_jobs
from lightning_egeria.cluster.jobs import Cluster
from lightning_egeria.cluster.policies import POLICIES
from lightning_egeria.cluster.records import Record
from lightning_egeria.cluster.simulator import simulate
from lightning_egeria.cluster.traces import read_applications
from lightning_egeria.cluster.workloads import read_workload
from lightning_egeria.errors import EgeriaError
from lightning_egeria.programs.arguments import whole_number
from lightning_egeria.programs.files import write_whole
from lightning_egeria.programs.terminal import printable

LIVE = ("fair", "pollux", "tiresias")
_EXTRAS = {"matplotlib": "report", "ray": "ray"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="egeria-cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="simulate|example|run")
    running = commands.add_parser("simulate", help="run a workload; write its log and pictures")
    running.add_argument("--policy", nargs="+", choices=sorted(POLICIES), default=["pollux"], help="default: pollux")
    running.add_argument(
        "--workload", type=Path, required=True, help="CSV: name,time,application,num_replicas,batch_size"
    )
    running.add_argument("--traces", type=Path, help="default: traces/ beside the workload, or one folder above")
    running.add_argument("--nodes", type=whole_number(1, 100_000), default=16, help="default: 16")
    running.add_argument("--devices", type=whole_number(1, 1000), default=4, help="of a node; default: 4")
    running.add_argument("--interval", type=float, default=60, help="seconds between two decisions; default: 60")
    running.add_argument("--out", type=Path, default=Path("simulation"), help="folder to write to; default: simulation")
    writing = commands.add_parser("example", help="write a small workload and its traces")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--jobs", type=whole_number(1, 1_000_000), default=40, help="default: 40")
    writing.add_argument("--seed", type=whole_number(), default=0, help="default: 0")
    live = commands.add_parser("run", help="run real jobs on Ray (extra: ray)")
    live.add_argument("jobs", type=Path, help="YAML: jobs: {NAME: {command: [PROGRAM, ...], devices: 1, ...}}")
    live.add_argument("--policy", choices=LIVE, default="pollux", help="default: pollux")
    live.add_argument("--out", type=Path, default=Path("jobs"), help="a folder for each job; default: jobs")
    live.add_argument("--interval", type=float, default=60, help="seconds between two decisions; default: 60")
    live.add_argument("--retries", type=whole_number(), default=3, help="how often a job may fail; default: 3")
    live.add_argument("--resource", default="CPU", help="a device, as Ray names it: CPU or GPU; default: CPU")
    live.add_argument("--address", help="of a Ray cluster, or 'auto'; default: start Ray on this machine")
    options = parser.parse_args(arguments)
    try:
        if options.command == "run":
            return _run(options)
        if options.command == "example":
            print(f"wrote {write_example(options.folder, options.jobs, seed=options.seed)} and traces/ beside it")
        else:
            _simulate(options)
    except EgeriaError as error:
        print(f"egeria-cluster: {printable(error, keep=chr(10))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        extra = _EXTRAS[error.name]
        print(f"egeria-cluster needs {error.name}: pip install 'lightning-egeria[{extra}]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("egeria-cluster: stopped. The same command goes on", file=sys.stderr)
        return 130
    except OSError as error:
        said = f"cannot write {error.filename}: {error.strerror or error}"
        print(f"egeria-cluster: {printable(said)}", file=sys.stderr)
        return 2
    return 0


def _simulate(options: argparse.Namespace) -> None:
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
        _draw(drawing.devices(records[-1]), options.out / f"devices-{name}.png")
    _draw(drawing.completion_times(records), options.out / "completion-times.png")
    _draw(drawing.utilisation(records), options.out / "utilisation.png")
    Console().print(_table(records))
    print(f"wrote logs and pictures to {options.out}")


def _draw(figure: Any, path: Path) -> None:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=150)
    write_whole(path, stream.getvalue())


def _run(options: argparse.Namespace) -> int:
    if options.address is None and "ray" not in sys.modules:
        # Ray reads this when it is imported. Without, versions before 2.59 run what other users of this machine send.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray takes seconds to import, and may be missing.
    from lightning_egeria.cluster.live import run_jobs
    from lightning_egeria.cluster.status import table_of

    fleet = run_jobs(
        read_jobs(options.jobs),
        POLICIES[options.policy](),
        options.out,
        resource=options.resource,
        interval_s=options.interval,
        retries=options.retries,
        address=options.address,
    )
    Console().print(table_of(fleet))
    if not all(job.has_ended for job in fleet.jobs.values()):
        raise KeyboardInterrupt  # Ray Tune has caught it, stopped the jobs, and returned
    failed = [name for name, job in fleet.jobs.items() if job.state == "failed"]
    if failed:
        print(f"egeria-cluster: {', '.join(failed)} failed; see log.txt in {options.out}/NAME", file=sys.stderr)
    return int(bool(failed))


def _table(records: Sequence[Record]) -> Table:
    table = Table("policy", "average completion", "longest", "makespan", "utilisation", "restarts")
    for record in records:
        restarts: dict[str, int] = {}
        for interval in record.intervals:
            restarts |= {name: job.restarts for name, job in interval.jobs.items()}
        table.add_row(
            record.policy,
            f"{record.average_completion_s:.0f} s",
            f"{max(record.completion_times.values()):.0f} s",
            f"{record.makespan_s:.0f} s",
            f"{record.utilisation:.0%}",
            str(sum(restarts.values())),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
