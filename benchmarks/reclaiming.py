"""What is it worth to take devices from jobs that freeze?

Pollux runs a workload three times: nothing freezes; jobs freeze, but Pollux sees them as if they did not; it sees how
much faster they are. Jobs freeze as one seed of a run of the proof did, scaled to the length of the job:

* cifar10: cifar10_resnet20/medium, from scratch
* imagenet: imagenette_resnet50/small, from scratch
* yolov3: camvid_deeplabv3/small
* bert: squad_bert/small, fine-tuning
* of the example, vision: finetune_imagenette_resnet56/small, fine-tuning

Others do not freeze. Exchanging gradients is taken to last as long as before, although less is exchanged.

    python benchmarks/reclaiming.py [--workload FILE ...] [--traces FOLDER] [--devices-of-a-node 4] [--nodes 16]
"""

import argparse
import tempfile
from pathlib import Path
from statistics import mean

from lightning_egeria.cluster.example import write_example
from lightning_egeria.cluster.freezing_runs import FreezingRun
from lightning_egeria.cluster.jobs import Cluster
from lightning_egeria.cluster.pollux import Pollux
from lightning_egeria.cluster.simulator import simulate
from lightning_egeria.cluster.traces import read_applications
from lightning_egeria.cluster.workloads import read_workload

RESULTS = Path(__file__).parent / "proof" / "results"
RUNS = {
    "cifar10": "cifar10_resnet20/medium",
    "imagenet": "imagenette_resnet50/small",
    "yolov3": "camvid_deeplabv3/small",
    "bert": "squad_bert/small",
    "vision": "finetune_imagenette_resnet56/small",
}
WAYS = {"nothing freezes": (False, True), "not seen": (True, False), "reclaimed": (True, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, nargs="+", help="default: the example")
    parser.add_argument("--traces", type=Path, help="default: those of the example")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--devices-of-a-node", type=int, default=4)
    options = parser.parse_args()
    cluster = Cluster.of(options.nodes, options.devices_of_a_node)
    freezing = {
        name: FreezingRun.read(RESULTS / run / "freezing-0.json", RESULTS / run / "costs.json")
        for name, run in RUNS.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        paths, traces = options.workload, options.traces
        if paths is None:
            paths, traces = [write_example(Path(folder), seconds_between=10)], Path(folder) / "traces"
        workloads = {path.stem: read_workload(path) for path in paths}
        applications = read_applications(
            traces, sorted({job.application for jobs in workloads.values() for job in jobs})
        )
    print("| average completion | " + " | ".join(WAYS) + " | of jobs that do not freeze: " + " | ".join(WAYS) + " |")
    print("|---" * (1 + 2 * len(WAYS)) + "|")
    for name, workload in workloads.items():
        row, others = [], []
        for freezes, reclaim in WAYS.values():
            runs = freezing if freezes else {}
            times = simulate(workload, applications, cluster, Pollux(), freezing=runs, reclaim=reclaim).completion_times
            row.append(mean(times.values()))
            others.append(mean(times[job.name] for job in workload if job.application not in freezing))
        print(f"| {name} | " + " | ".join(f"{seconds:.0f} s" for seconds in row + others) + " |", flush=True)


if __name__ == "__main__":
    main()
