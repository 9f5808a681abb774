"""JigSaw: iterations of several jobs, cut to fit, share devices in rounds.

Kumar et al. (arXiv:2111.10672) name the idea: a scheduler of iterations that uses structured partial backprop. The
rules are ours. A round is some iterations long. The job with most work left chooses its devices first and runs on them
until the round ends. The next ones take devices that are free, or what is left of the round behind others. All workers
of an iteration start at once. An iteration is as short as the job's floor allows. Where nothing fits behind it, it is
as deep as the round allows, and the job may be shorter later.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from benchmarks.scheduling.iterations import IterationJob, IterationRun, check_gangs

ROUND_ITERATIONS = 16  # of the slowest job with full backprop
MOST_REPEATS = 100  # of a round before the next is planned
_ROUNDING = 1e-9


@dataclasses.dataclass
class Turn:
    """One iteration in a round.

    Attributes:
        job: whose.
        devices: that its gang holds in this round.
        start: seconds into the round.
        depth: layer modules that it goes back through.
    """

    job: IterationJob
    devices: list[int]
    start: float
    depth: int

    @property
    def end(self) -> float:
        """Seconds into the round."""
        return self.start + self.job.cost.seconds[self.depth - 1]


@dataclasses.dataclass
class Progress:
    """What is left of a job.

    Attributes:
        iterations: until its end.
        credit: layer modules that its iterations were deeper than its floor, in total.
    """

    iterations: int
    credit: float = 0.0


def plan_round(jobs: Sequence[IterationJob], progress: dict[str, Progress], devices: int) -> tuple[float, list[Turn]]:
    """Return the length of a round in seconds, and its turns.

    Args:
        jobs: that have arrived and not ended.
        progress: of each, by name.
        devices: of the cluster.
    """
    length = ROUND_ITERATIONS * max(job.cost.full_s for job in jobs)
    busy, memory = [0.0] * devices, [0.0] * devices
    turns: dict[str, list[Turn]] = {}
    for job in sorted(jobs, key=lambda job: -job.gang * progress[job.name].iterations * job.cost.full_s):
        need = job.cost.memory[job.usual_depth - 1]
        gang = _gang(job.gang, need, busy, memory)
        if gang is None:
            continue
        left, start = progress[job.name], max(busy[device] for device in gang)
        credit, own = left.credit, list[Turn]()
        while len(own) < left.iterations:
            turn = Turn(job, gang, start, max(1, math.ceil(job.least_depth - credit - _ROUNDING)))
            if turn.end > length + _ROUNDING:
                break
            credit += turn.depth - job.least_depth
            start = turn.end
            own.append(turn)
        if own:
            turns[job.name] = own
            for device in gang:
                busy[device] = start
                memory[device] += need
    _deepen(turns, busy, memory, length)
    return length, [turn for own in turns.values() for turn in own]


def _gang(size: int, need: float, busy: Sequence[float], memory: Sequence[float]) -> list[int] | None:
    """Return the devices that are free first and have the memory; None if there are too few."""
    room = [device for device in range(len(busy)) if memory[device] + need <= 1 + _ROUNDING]
    return sorted(room, key=busy.__getitem__)[:size] if len(room) >= size else None


def _deepen(turns: dict[str, list[Turn]], busy: Sequence[float], memory: list[float], length: float) -> None:
    """Let the last iterations on their devices go back as far as the round leaves them time, and memory."""
    for own in turns.values():
        last, cost = own[-1], own[-1].job.cost
        if any(busy[device] > last.end + _ROUNDING for device in last.devices):
            continue
        while last.depth < cost.depths and last.start + cost.seconds[last.depth] <= length + _ROUNDING:
            # The memory of the usual depth is there already.
            if last.depth >= last.job.usual_depth:
                more = cost.memory[last.depth] - cost.memory[last.depth - 1]
                if any(memory[device] + more > 1 + _ROUNDING for device in last.devices):
                    break
                for device in last.devices:
                    memory[device] += more
            last.depth += 1


def run_rounds(jobs: Sequence[IterationJob], devices: int) -> IterationRun:
    """Run jobs until the last has ended, round by round. A round is repeated until a job arrives or ends.

    Args:
        jobs: with a floor of 1 for full backprop.
        devices: of the cluster.

    Raises:
        SchedulingError: a job asks for more devices than there are.
    """
    check_gangs(jobs, devices)
    run = IterationRun(jobs, devices)
    progress = {job.name: Progress(job.iterations) for job in jobs}
    waiting = sorted(jobs, key=lambda job: job.arrival_s)
    present: list[IterationJob] = []
    now = 0.0
    while waiting or present:
        if not present:
            now = max(now, waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= now:
            present.append(waiting.pop(0))
        length, turns = plan_round(present, progress, devices)
        of_job = {job.name: [turn for turn in turns if turn.job is job] for job in present}
        gained = {job.name: sum(turn.depth - job.least_depth for turn in of_job[job.name]) for job in present}
        repeats = MOST_REPEATS
        for name, own in of_job.items():
            if own:
                repeats = min(repeats, progress[name].iterations // len(own))
            if gained[name] < -_ROUNDING:
                repeats = min(repeats, int((progress[name].credit + _ROUNDING) / -gained[name]))
        if waiting:
            repeats = min(repeats, math.ceil((waiting[0].arrival_s - now) / length))
        repeats = max(1, repeats)
        for job in list(present):
            left, own = progress[job.name], of_job[job.name]
            left.iterations -= repeats * len(own)
            left.credit += repeats * gained[job.name]
            if left.iterations == 0:
                run.ended[job.name] = now + (repeats - 1) * length + own[-1].end
                run.mean_depth[job.name] = job.floor + left.credit / (job.iterations * job.cost.depths)
                present.remove(job)
        now += repeats * length
    return run
