"""What jobs, the cluster and plans read from disk: what the package writes, and what may come of other bytes.

A reader lets only errors of the package through, each with a message; whatever it accepts is used as the package would.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from fuzz.formats import EXACT, OTHER, Format, WrongError
from lightning_egeria.cluster.freezing_runs import FreezingRun
from lightning_egeria.cluster.goodput import BatchLimits
from lightning_egeria.cluster.hints import Hints
from lightning_egeria.cluster.records import Interval, JobState, Record
from lightning_egeria.cluster.tables import read_table
from lightning_egeria.cluster.throughput import ThroughputModel
from lightning_egeria.cluster.workloads import Submission, read_philly, read_workload, write_workload
from lightning_egeria.errors import EgeriaError
from lightning_egeria.jobs.endings import cost_in, note_end
from lightning_egeria.jobs.environments import requirements_in
from lightning_egeria.jobs.execution import secrets_of
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.jobfolders import JobFolder, State, Status
from lightning_egeria.jobs.jobfolders import Submission as Submitted
from lightning_egeria.jobs.listing import table
from lightning_egeria.jobs.preparing import command_for
from lightning_egeria.jobs.provenance import provenance_of
from lightning_egeria.jobs.rules import read_description
from lightning_egeria.jobs.rundirs import read_run_directory, remove, write_run_directory
from lightning_egeria.jobs.sbatch import sbatch_options
from lightning_egeria.jobs.scheduling import QueueEntry, Scheduler, policy_named
from lightning_egeria.methods.pipelining.command import read_graph
from lightning_egeria.methods.pipelining.graph import ComputationGraph, Node
from lightning_egeria.methods.pipelining.plan import Plan, Stage
from lightning_egeria.methods.pipelining.planner import Limits, plan_graph
from lightning_egeria.methods.pipelining.timeline import predict

DESCRIPTION = b"""\
name: tune
entry:
  experiment: default
  overrides: [trainer=cpu, "model.net.depth=20"]
environment:
  variables: {A: "1"}
  secrets: [TOK]
resources: {devices: 2, memory: 16GB, time: 90m}
data:
  images: {path: x, digest: "sha256:%s", stage: true}
optimisations: {freezing: true, cache: {host_bytes: 5}}
retries: 2
checkpoints: {every_steps: 5, grace: 30s}
notifications: {done: [echo, done]}
queue: {priority: 1, after: ["3"]}
sweep: {optimizer.lr: ["0.1", 1e-3]}
""" % (b"0" * 64)
COMMAND = b"name: hello\nentry: {command: echo hello, files: ['*.py']}\nsweep: {LR: [1, 2]}\n"
MODEL = ThroughputModel((0.01, 0.001), (0.02, 0.002), (0.005, 0.0005), 2.0)
A_GRAPH = ComputationGraph(tuple(Node(name, 1.0, 2.0, 10, 20, 30) for name in "abcd"), ((0, 1), (0, 2), (1, 3), (2, 3)))


def job_formats(folder: Path) -> list[Format]:
    """All of them; readers write to ``folder``."""
    folder.mkdir(mode=0o700, parents=True)
    return [
        description_format(folder / "job.yaml"),
        typed_format(folder / "typed.yaml"),
        requirements_format(),
        run_format(folder / "runs"),
        forged_run_format(folder / "forged"),
        status_format(folder / "home"),
        submission_format(folder / "submitted"),
        results_format(folder / "results"),
        hints_format(folder / "hints"),
        graph_format(folder / "graph.json"),
        plan_format(folder / "plan.json"),
        simulation_format(folder / "log.jsonl"),
        workload_format(folder / "workload.csv"),
        trace_format(folder / "placements.csv"),
        costs_format(folder / "costs"),
        repository_format(folder / "repository"),
    ]


def reading(use: Callable[[bytes], object], seeds: tuple[bytes, ...]) -> Callable[[bytes], str]:
    """Return a reader of what is used as ``use`` does."""

    def read(data: bytes) -> str:
        try:
            use(data)
        except EgeriaError as error:
            if not str(error).strip():
                raise WrongError("an error without a message") from error
            return type(error).__name__
        return EXACT if data in seeds else OTHER

    return read


def file_format(name: str, share: float, path: Path, use: Callable[[Path], object], *seeds: bytes, **rest) -> Format:
    """A file that is read from a path."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def written(data: bytes) -> None:
        path.write_bytes(data)
        use(path)

    return Format(name, share, seeds, reading(written, seeds), **rest)


# --- jobs -----------------------------------------------------------------------------------------------------------


def options_of(job: dict) -> None:
    """What Slurm is told of a job."""
    for gpus in (True, False):
        for key, value in sbatch_options(job, gpus).items():
            texts = [*value.values(), *value] if isinstance(value, dict) else [value]
            if key != "setup" and any("\n" in str(text) or "\0" in str(text) for text in texts):
                raise WrongError(f"an option of sbatch that is more than one line: {value!r}")


def description_format(path: Path) -> Format:
    def use(path: Path) -> None:
        options_of(dataclasses.asdict(read_description(path).content))

    return file_format("description of a job", 0.1, path, use, DESCRIPTION, COMMAND)


def typed_format(path: Path) -> Format:
    """Settings of the command line, one a line."""
    path.write_bytes(COMMAND)

    def use(data: bytes) -> None:
        options_of(dataclasses.asdict(read_description(path, data.decode(errors="replace").split("\n")).content))

    seeds = (b"resources.devices=2\nretries=3", b"environment.variables={A: 1}", b"queue.after=['1']\nname=x")
    return Format("settings of a job", 0.1, seeds, reading(use, seeds))


def requirements_format() -> Format:
    def use(data: bytes) -> None:
        for pinned in (True, False):
            for line in requirements_in(data.decode(errors="replace"), pinned):
                name = line.partition(";")[0]
                if "/" in name or "\\" in name or line.startswith("-") or "@" in name or not line.isprintable():
                    raise WrongError(f"{line!r} is no requirement")

    seeds = (b"torch==2.6.0\nx[a,b]==1.0 ; python_version > '3'\n", b"a==1\nb==1.0.post1+local # why\n")
    return Format("requirements", 0.1, seeds, reading(use, seeds))


RUN = {"job.json": b"{}", "code/train.py": b"print(1)", "requirements.lock": b"x==1\n", "explanation.txt": b"why"}


def a_job() -> dict:
    path = Path("job.yaml")
    values = dataclasses.asdict(_described())
    del values["sweep"]
    return {**values, "methods": {}, "own_environment": False, "cost_key": "", "epochs": 3, "path": str(path)}


def _described():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_bytes(DESCRIPTION)
        return read_description(path).content


def run_format(folder: Path) -> Format:
    """One file of a run directory, which the first byte names."""
    contents = {**RUN, "job.json": json.dumps(a_job()).encode()}
    place = write_run_directory(folder, contents)
    names = ["manifest.json", *sorted(contents)]
    sound = {name: (place / name).read_bytes() for name in names}
    for path in [place, *place.rglob("*")]:
        path.chmod(0o700)
    seeds = tuple(bytes([number]) + sound[name] for number, name in enumerate(names))

    def use(data: bytes) -> None:
        name = names[(data[0] if data else 0) % len(names)]
        (place / name).write_bytes(data[1:])
        try:
            job = read_run_directory(place)
        finally:
            (place / name).write_bytes(sound[name])
        if job["name"] != "tune" or (name != "explanation.txt" and data[1:] != sound[name]):
            raise WrongError("a changed run directory was read")

    return Format("run directory", 0.1, seeds, reading(use, seeds))


def forged_run_format(folder: Path) -> Format:
    """A job with right digests: by someone who knows how, not by accident."""
    seed = json.dumps(a_job()).encode()
    submission = Submitted(1, "a", "/runs/x", "/here", "local")
    job_folder = JobFolder.create(folder / "1", submission)

    def use(data: bytes) -> None:
        place = write_run_directory(folder / "runs", {**RUN, "job.json": data})
        try:
            job = read_run_directory(place)
            options_of(job)
            command_for(job, job_folder, "python", 1)
            secrets_of(job, {"TOK": "12345678"})
        finally:
            remove(place)

    return Format("forged job", 0.05, (seed,), reading(use, (seed,)), json_from=0)


def status_format(folder: Path) -> Format:
    home = Home(folder)
    job = {"name": "a", "queue": {"priority": 0}, "resources": {"devices": 1, "most_devices": None}}
    with home.history() as history, history.transaction():
        history.add(job, Path("/runs/x"), "local")
    place = JobFolder.create(home.jobs / "1", Submitted(1, "a", "/runs/x", "/here", "local"))
    place.write_status(Status(State.DONE, 2, started=1.5, ended=3.0, message="done", host="here", progress=7))
    seed = (place.path / "status.json").read_bytes()
    history = home.history()

    def use(data: bytes) -> None:
        (place.path / "status.json").write_bytes(data)
        note_end(history, 1)
        "".join(table([history.get(1)], home)).encode()

    return Format("status of a job", 0.1, (seed,), reading(use, (seed,)), json_from=0)


def submission_format(folder: Path) -> Format:
    place = JobFolder.create(folder, Submitted(1, "a", "/runs/x", "/here", "local"))
    path = place.path / "submission.json"
    seed = path.read_bytes()

    def use(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(OSError):  # as when a job starts
            Path(place.submission().run).exists()

    return Format("submission of a job", 0.1, (seed,), reading(use, (seed,)), json_from=0)


def results_format(folder: Path) -> Format:
    """The record of a job that has ended, for what it has cost."""
    folder.mkdir()
    step = {"batches": 2, "data": 0.1, "forward": 0.2, "backward": 0.3, "communication": 0.4, "rest": 0.0}
    seed = json.dumps({"steps": [step]}).encode()
    (folder / "savings.json").write_text('{"fit_time_s": 7.5}')
    (folder / "job.json").write_text('{"epochs": 3}')

    def use(data: bytes) -> None:
        (folder / "egeria.json").write_bytes(data)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):  # as when a job ends
            cost_in(folder, folder)

    return Format("results of a job", 0.1, (seed,), reading(use, (seed,)), json_from=0)


# --- cluster --------------------------------------------------------------------------------------------------------


def hints_format(folder: Path) -> Format:
    """The hints of a job, and what Pollux makes of them."""
    hints = Hints(BatchLimits(32, 1024, 8, 256), 2, 120.5, 0.5, 40.0, MODEL, MODEL.scaled(2))
    folder.mkdir()
    path = folder / "hints.json"
    hints.write(path)
    seed = path.read_bytes()
    jobs = [QueueEntry(1, 0.0, 1, 2, hints=path), QueueEntry(2, 0.0, 1, 2)]

    def use(data: bytes) -> None:
        path.write_bytes(data)
        Scheduler(policy_named("pollux")).decide(jobs, {"here": 2}, 1.0)
        Hints.read(path)

    return Format("hints of a job", 0.03, (seed,), reading(use, (seed,)), json_from=0)


def simulation_format(path: Path) -> Format:
    record = Record("policy", (2,), 10, {"a": 0, "b": 5})
    both = {"a": JobState(((0, 1),), 0, 0.5, 1, 0), "b": JobState(((0, 1),), 0, 0.0, 1, 0)}
    record.intervals = [Interval(10, both, {}), Interval(20, {}, {"a": 15, "b": 15.5})]
    record.write(path)

    def use(path: Path) -> None:
        found = Record.read(path)
        [interval.devices + 1 for interval in found.intervals]
        [time + 1 for time in found.completion_times.values()]

    return file_format("log of a simulation", 0.1, path, use, path.read_bytes())


def workload_format(path: Path) -> Format:
    write_workload(path, [Submission("a", 0, "vision", 2, 64), Submission("b", 5, "text", 1, 32)])
    philly = b"timestamp,duration,num_gpus\n2017-10-03 00:00:00,100.5,2\n"

    def use(path: Path) -> None:
        if path.read_bytes()[:9] == b"timestamp":
            read_philly(path)
        else:
            read_workload(path)

    return file_format("workload", 0.1, path, use, path.read_bytes(), philly)


def trace_format(path: Path) -> Format:
    seed = b"placement,local_bsz,step_time,sync_time\n1,32,0.1,0.0\n2,32,0.2,0.05\n11,64,0.3,0.1\n"

    def use(path: Path) -> None:
        read_table(path, ("placement", "local_bsz", "step_time", "sync_time"), keys=2)

    return file_format("trace", 0.05, path, use, seed)


def costs_format(folder: Path) -> Format:
    """The result of a run that froze."""
    folder.mkdir()
    run = json.dumps({"steps": 100, "events": [{"step": 10, "depth": 1}, {"step": 50, "depth": 2}]}).encode()
    (folder / "shares.json").write_text(json.dumps({"shares": {"1": 0.9, "2": 0.7}}))

    def use(path: Path) -> None:
        FreezingRun.read(path, folder / "shares.json").share_at(0.5)

    return file_format("run that froze", 0.05, folder / "run.json", use, run, json_from=0)


# --- plans ----------------------------------------------------------------------------------------------------------


def planned(path: Path) -> None:
    graph = read_graph(str(path))
    if len(graph.nodes) <= 8:
        plan = plan_graph(graph, Limits(2, 2))
        predict(plan).text(20)
        Plan.from_json(plan.to_json())


def graph_format(path: Path) -> Format:
    seed = json.dumps(A_GRAPH.to_state()).encode()
    return file_format("graph", 0.05, path, planned, seed, json_from=0)


def plan_format(path: Path) -> Format:
    seed = Plan(A_GRAPH, (Stage("0", (0, 1)), Stage("1", (2, 3), 2)), 4).to_json().encode()
    return file_format("plan", 0.05, path, planned, seed, json_from=0)


# --- a repository ---------------------------------------------------------------------------------------------------


def repository_format(top: Path) -> Format:
    """One file of the repository that a description lies in, which the first byte names."""
    top.mkdir()
    for name in ("a", ".gitattributes"):
        (top / name).write_text("* text=auto filter=evil\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "x"], ["pack-refs", "--all"]):
        subprocess.run(["git", "-C", top, *command], check=True, capture_output=True)
    (top / "a").write_text("2\n")
    names = [".git/HEAD", ".git/config", ".git/index", ".git/packed-refs", ".gitattributes"]
    sound = {name: (top / name).read_bytes() for name in names}
    seeds = tuple(bytes([number]) + sound[name] for number, name in enumerate(names))

    def use(data: bytes) -> None:
        name = names[(data[0] if data else 0) % len(names)]
        (top / name).write_bytes(data[1:])
        try:
            provenance_of(top)
        finally:
            (top / name).write_bytes(sound[name])
            os.utime(top / name, (1, 1))

    return Format("repository", 0.0005, seeds, reading(use, seeds))
