"""Live jobs on Ray Tune: a policy decides how many devices each has, and Ray starts, stops and restarts them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.execution.placement_groups import PlacementGroupFactory
from ray.tune.experiment import Trial
from ray.tune.schedulers import ResourceChangingScheduler, TrialScheduler
from ray.tune.search import Searcher
from rich.console import Console

from lightning_egeria.cluster.fleet import Fleet, LiveJob
from lightning_egeria.cluster.job_files import JobDescription
from lightning_egeria.cluster.jobs import Allocation, Cluster, Policy
from lightning_egeria.cluster.ray_session import quiet, started
from lightning_egeria.cluster.status import Status
from lightning_egeria.errors import ArgumentError, JobError
from lightning_egeria.programs import files
from lightning_egeria.programs.processes import ProgramProcess, kill_marked

DONE, LOCK, LOG, TUNE = "done", "lock", "log.txt", ".tune"
LARGEST_DONE = 2**21  # of a file that holds a command, which a description of at most 1 MiB has named
GRACE_S = 30.0  # for a job to write a checkpoint
POLL_S = 1.0
_PIN = 0.001  # of a node's own resource, which places a job on it


class JobTrial(tune.Trainable):  # type: ignore[misc]  # Ray is not there in each environment that is checked
    """A trial of Ray Tune that runs the process of a job.

    The first step of a trial only reports, so that a policy may give it its devices before the process starts.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Take the job from the configuration."""
        self._job = JobDescription(**config["job"])
        self._folder, self._resource = Path(config["folder"]) / self._job.name, config["resource"]
        self._process: ProgramProcess | None = None
        self._was_restored = False

    def step(self) -> dict[str, Any]:
        """Run the process for a moment.

        Raises:
            JobError: it has ended with a status other than 0.
        """
        devices = int(self.trial_resources.required_resources[self._resource])
        report = {"job": self._job.name, "devices": devices, "seconds": 0.0, "runs": True}
        if self._process is None:
            if self.iteration == 0 and not self._was_restored:
                return report | {"runs": False}
            self._process = self._start(devices)
        began = time.monotonic()
        status = self._process.wait(POLL_S)
        report["seconds"] = time.monotonic() - began
        if status is None:
            return report
        if status != 0:
            self._process = None
            raise JobError(
                f"job {self._job.name!r} has ended with status {status}, expected 0. See {self._folder / LOG}"
            )
        files.write_whole(self._folder / DONE, done_mark(self._job), files.PRIVATE)
        return report | {"done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """The job keeps its checkpoints in its folder."""
        return {"folder": str(self._folder)}

    def load_checkpoint(self, checkpoint: Any) -> None:
        """The job finds its checkpoints in its folder."""
        self._was_restored = True

    def cleanup(self) -> None:
        """Stop the process."""
        if self._process is not None:
            self._process.stop(GRACE_S)
            self._process = None

    def _start(self, devices: int) -> ProgramProcess:
        kill_marked(self._folder)  # what a killed attempt has left
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TUNE_"))}
        environment = inherited | {"EGERIA_DEVICES": str(devices)} | self._job.environment
        arguments, log = self._job.arguments(devices, self._folder), self._folder / LOG
        try:
            return ProgramProcess(arguments, self._folder, environment, log=log)
        except JobError as error:
            with files.adding(log) as file:
                file.write(f"egeria-cluster: {error}\n".encode(errors="replace"))
            raise
        except OSError as error:
            raise JobError(f"the log {log} cannot be written: {error.strerror or error}") from error


class PolicyAllocation:
    """Allocation function of Ray Tune's `ResourceChangingScheduler` that asks a policy of this package.

    Args:
        fleet: the jobs and the policy.
        resource: Ray's name of a device, ``"CPU"`` or ``"GPU"``.
        addresses: of the nodes, to place a job where the policy wants it; None leaves the place to Ray.
    """

    def __init__(self, fleet: Fleet, resource: str, addresses: Sequence[str] | None = None) -> None:
        self.fleet = fleet
        self._resource, self._addresses = resource, addresses

    def __call__(
        self, controller: Any, trial: Trial, result: dict[str, Any], scheduler: ResourceChangingScheduler
    ) -> PlacementGroupFactory | None:
        """Return the resources a trial shall have; None if its job shall wait."""
        return self.bundle(self.fleet.allocation(job_of(trial)))

    def bundle(self, allocation: Allocation) -> PlacementGroupFactory | None:
        """Return an allocation as Ray has it; None for an empty one."""
        if not allocation:
            return None
        ((node, devices),) = allocation
        place = {f"node:{self._addresses[node]}": _PIN} if self._addresses is not None else {}
        return PlacementGroupFactory([{self._resource: devices, **place}])


class PolicyScheduler(ResourceChangingScheduler):  # type: ignore[misc]
    """Also pauses the trials of jobs that shall wait, and tells the fleet what happens."""

    def __init__(self, allocation: PolicyAllocation) -> None:
        super().__init__(resources_allocation_function=allocation)
        self._allocation, self._fleet = allocation, allocation.fleet

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Count the time, and decide whether the trial goes on, moves or waits."""
        fleet, name = self._fleet, job_of(trial)
        if result["runs"] and fleet.jobs[name].running != result["devices"]:
            fleet.started(name, result["devices"])
        fleet.ran(name, result["seconds"])
        if result.get("done"):
            return str(TrialScheduler.CONTINUE)  # Tune stops it
        if fleet.devices(name):
            decision = str(super().on_trial_result(tune_controller, trial, result))
        else:
            decision = str(TrialScheduler.PAUSE)
        if decision == TrialScheduler.PAUSE:
            fleet.stopped(name, "waiting")
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any], **kwargs: Any) -> None:
        """The job is done."""
        self._fleet.stopped(job_of(trial), "done")
        super().on_trial_complete(tune_controller, trial, result, **kwargs)

    def on_trial_error(self, tune_controller: Any, trial: Trial, **kwargs: Any) -> None:
        """The job has failed too often."""
        self._fleet.stopped(job_of(trial), "failed")
        super().on_trial_error(tune_controller, trial, **kwargs)

    def choose_trial_to_run(self, tune_controller: Any, **kwargs: Any) -> Trial | None:
        """Return a new trial, or one that waits and whose job has devices again."""
        super().choose_trial_to_run(tune_controller, **kwargs)  # sets the resources of trials that move
        trials = tune_controller.get_trials()
        for trial in trials:
            if trial.status == Trial.PENDING:
                return trial
        for trial in trials:
            if trial.status == Trial.PAUSED:
                wanted = self._allocation.bundle(self._fleet.allocation(job_of(trial)))
                if wanted is not None:
                    if trial.placement_group_factory != wanted:
                        self.set_trial_resources(trial, wanted)
                    return trial
        return None


class Follower(tune.Callback):  # type: ignore[misc]
    """Shows the jobs in the terminal, and tells the fleet of jobs that start again after a failure."""

    def __init__(self, fleet: Fleet, status: Status) -> None:
        self._fleet, self._status = fleet, status

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes its callbacks to disk, and nothing reads them

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """The job has failed and will start again."""
        self._fleet.stopped(job_of(trial), "waiting")

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Something may have changed."""
        self._status.show(self._fleet)


class Arrivals(Searcher):  # type: ignore[misc]
    """Makes a trial of each job once it has arrived and the policy gives it devices."""

    def __init__(self, fleet: Fleet, config: dict[str, Any]) -> None:
        super().__init__()
        self._fleet, self._config = fleet, config
        self._made: set[str] = set()

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the next job; None while there is none."""
        jobs = self._fleet.jobs
        if all(name in self._made or job.has_ended for name, job in jobs.items()):
            return str(Searcher.FINISHED)
        job = self._next()
        if job is None:
            if not self._fleet.active:  # nothing runs, and Tune would wait for ten minutes at most
                time.sleep(self._fleet.next_arrival_s or 0)
            return None
        self._made.add(job.description.name)
        return self._config | {"job": vars(job.description)}

    def _next(self) -> LiveJob | None:
        for job in self._fleet.active:
            if job.description.name not in self._made and self._fleet.devices(job.description.name):
                return job
        return None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing is learnt from it."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing is kept: a run that starts again reads the folders of the jobs."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was kept."""


def done_mark(job: JobDescription) -> str:
    """Return what the file of a job that is done holds: what it has run."""
    return json.dumps({"command": job.command, "environment": job.environment}, sort_keys=True)


def own_folder(folder: Path, links: bool = True) -> Path:
    """Make a folder for this user alone, or take one that is; return its path without links.

    Raises:
        JobError: another user could have written to it.
    """
    try:
        files.make_private(folder, close=False)
        files.check_private(folder, links)
        files.check_above(folder)
    except OSError as error:
        raise JobError(
            f"cannot use {folder}: {error.filename}: {error.strerror or error}. Jobs run and write there: name a "
            "folder of your own with --out"
        ) from error
    return folder.resolve()


def _is_done(job: JobDescription, folder: Path) -> bool:
    """Whether an earlier run has done a job.

    Raises:
        JobError: it was another one.
    """
    try:
        found = files.read_text(folder / DONE, LARGEST_DONE, links=False)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise JobError(
            f"{folder / DONE} cannot be read: {error}. Remove it, and job {job.name!r} runs again"
        ) from error
    if found != done_mark(job):
        raise JobError(
            f"job {job.name!r} was done in {folder} with another command or environment. Remove that folder, or name "
            "another one with --out"
        )
    return True


def job_of(trial: Trial) -> str:
    """Return the name of the job that a trial runs."""
    return str(trial.config["job"]["name"])


def run_jobs(
    jobs: Sequence[JobDescription],
    policy: Policy,
    folder: Path,
    *,
    resource: str = "CPU",
    interval_s: float = 60.0,
    retries: int = 3,
    address: str | None = None,
    console: Console | None = None,
) -> Fleet:
    """Run jobs until all have ended, and return what became of them.

    A job that another run in the same folder has done is not run again; one that was stopped is started, and goes on
    where its own checkpoint is. Without ``address``, Ray is started on this machine and stopped at the end.

    Args:
        jobs: their descriptions.
        policy: decides who has which devices. It must be new.
        folder: for a folder of each job; on a cluster, all nodes must see it.
        resource: Ray's name of a device.
        interval_s: seconds between two decisions of the policy.
        retries: how often a job may fail before it is given up.
        address: of a Ray cluster, or ``"auto"``.
        console: shows what the jobs do; None shows it on stderr.

    Raises:
        ArgumentError: ``interval_s`` or ``retries`` is out of range.
        JobError: another run has the folder, another user could have written to it, or a job asks for more than a node
            has.
    """
    if not interval_s > 0 or retries < 0:
        raise ArgumentError(f"interval_s must be positive and retries at least 0, got {interval_s} and {retries}")
    folder = own_folder(folder)
    status = Status(console if console is not None else Console(stderr=True))
    with files.held(folder / LOCK) as free, quiet(), contextlib.closing(status), contextlib.ExitStack() as stack:
        if not free:
            raise JobError(f"another run has the jobs in {folder}. Wait for it, or name another folder")

        # Before Ray starts, which takes seconds.
        places = {job.name: own_folder(folder / job.name, links=False) for job in jobs}
        done = [job.name for job in jobs if _is_done(job, places[job.name])]

        def end_jobs() -> None:
            status.close()
            for job in jobs:
                kill_marked(folder / job.name)

        stack.enter_context(started(address, end_jobs))
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource, 0) >= 1]
        if not nodes:
            raise JobError(f"the Ray cluster has no {resource}")
        cluster = Cluster(tuple(int(node["Resources"][resource]) for node in nodes))
        addresses = [node["NodeManagerAddress"] for node in nodes] if len(nodes) > 1 else None
        began = time.monotonic()
        fleet = Fleet(jobs, cluster, policy, folder, interval_s, lambda: time.monotonic() - began)
        for name in done:
            fleet.jobs[name].state = "done"
        if all(job.has_ended for job in fleet.jobs.values()):
            return fleet
        config = {"folder": str(folder), "resource": resource}
        tuner = tune.Tuner(
            tune.with_resources(JobTrial, {resource: 1}),
            tune_config=tune.TuneConfig(
                search_alg=Arrivals(fleet, config),
                scheduler=PolicyScheduler(PolicyAllocation(fleet, resource, addresses)),
                num_samples=-1,
                trial_dirname_creator=lambda trial: str(trial.trial_id),
            ),
            run_config=tune.RunConfig(
                name=TUNE,
                storage_path=str(folder),
                verbose=0,
                callbacks=[Follower(fleet, status)],
                failure_config=tune.FailureConfig(max_failures=retries),
            ),
        )
        try:
            tuner.fit()
        finally:
            shutil.rmtree(folder / TUNE, ignore_errors=True)  # nothing reads what Tune has written
        status.show(fleet)
    return fleet
