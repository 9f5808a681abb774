"""What `optimisations: auto` of a job goes by, from the files of the runs: `lightning_egeria/jobs/evidence.json`.

python -m benchmarks.proof.evidence
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.proof.figures import REPOSITORY
from benchmarks.proof.results import Run, read_all
from benchmarks.proof.workloads import RESULTS, WORKLOADS
from lightning_egeria.jobs.experiments import arguments_of, composed, facts_of
from lightning_egeria.jobs.optimisations import Facts

EVIDENCE = REPOSITORY / "lightning_egeria" / "jobs" / "evidence.json"
# The methods that a run trained with, as a job names them, and the plain run that was made as short.
SETS = {
    "freezing": (["freezing"], "shortened"),
    "cached": (["freezing", "cache"], "shortened"),
    "partial": (["partial"], "partial shortened"),
    "selective": (["selecting"], "shortened_selective"),
}
ABOUT_AS_SHORT = 0.02  # of the plain time, by which the plain run may be shorter than the method


def evidence() -> dict[str, Any]:
    """Return the content of the file."""
    pairs = [json.loads(line)["pairs"] for line in (RESULTS / "never_costs.jsonl").read_text().splitlines()]
    lost = [statistics.median(cached - plain for plain, cached, _ in job) for job in pairs]
    return {
        "command": "python -m benchmarks.proof.evidence",
        "cache_costs_s": round(max(lost), 2),
        "comparisons": [
            {"workload": workload, "size": size, **comparison}
            for workload, size in sorted((path.parts[-3], path.parts[-2]) for path in RESULTS.glob("*/*/costs.json"))
            for comparison in _comparisons(_facts(workload, size), read_all(workload, size))
        ],
    }


def _facts(workload: str, size: str) -> Facts:
    overrides = [override.format(data="/data", size=size) for override in WORKLOADS[workload].overrides]
    return facts_of(composed(arguments_of(workload, [*overrides, f"size={size}"])))


def _comparisons(facts: Facts, runs: Sequence[Run]) -> Iterator[Mapping[str, Any]]:
    by_method: dict[str, list[Run]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    if not (plain := by_method.get("plain")):
        return
    whole = statistics.fmean(run.seconds for run in plain)
    for method, (names, shorter) in SETS.items():
        if not (own := by_method.get(method)):
            continue
        seconds, short = statistics.fmean(run.seconds for run in own), by_method.get(shorter, [])
        fair = bool(short) and statistics.fmean(run.seconds for run in short) >= seconds - ABOUT_AS_SHORT * whole
        yield {
            "kind": facts.kind,
            "augmented": facts.augmented,
            "epochs": facts.epochs,
            "plain_s": round(whole),
            "methods": names,
            "seeds": len(own),
            "time": round(seconds / whole, 2),
            "points": _points(own, plain),
            "than_as_short": _points(own, short) if fair else None,
        }


def _points(runs: Sequence[Run], others: Sequence[Run]) -> float | None:
    theirs = {run.seed: run.final for run in others}
    both = [100 * (run.final - theirs[run.seed]) for run in runs if run.seed in theirs]
    return round(statistics.fmean(both), 1) if both else None


def main() -> None:
    """Write the file."""
    content = evidence()
    lines = ",\n".join(f"  {json.dumps(one)}" for one in content.pop("comparisons"))  # one a line, for diffs
    EVIDENCE.write_text(f'{json.dumps(content)[:-1]}, "comparisons": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
