"""A linear layer on a backbone that the user has frozen: plain Lightning, features stored by hand, and our cache.

Each way trains the same head for the same steps, in turns, in this process. Results are added to
`benchmarks/proof/results/frozen_backbone.jsonl`.

    python -m benchmarks.frozen_backbone --data FOLDER [--task trashnet] [--epochs 10 30] [--runs 3] [--threads 1]
    python -m benchmarks.frozen_backbone --table
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn

from benchmarks.alternatives.methods import lines_of, stored
from benchmarks.alternatives.tasks import TASKS, Data, FineTuning, Task, silent_trainer
from benchmarks.proof.run import about, quiet
from lightning_egeria import FrozenPrefixCache

RESULTS = Path(__file__).parent / "proof" / "results" / "frozen_backbone.jsonl"
Train = Callable[[FineTuning, Any], None]


def plain(module: FineTuning, data: Data, train: Train) -> None:
    train(module, data)


def by_hand(module: FineTuning, data: Data, train: Train) -> None:
    backbone, module.backbone = module.backbone, nn.Identity()
    loaders = data.train_dataloader(), data.val_dataloader()
    features, held = (stored(backbone, loader) for loader in loaders)
    train(module, Data(features, held, data.batch_size, None))


def cached(module: FineTuning, data: Data, train: Train) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(module, FrozenPrefixCache(data, cache_dir=folder))


WAYS = {"plain": plain, "by hand": by_hand, "FrozenPrefixCache": cached}
# That a plain run does not have; the folder of this benchmark is not the user's.
LINES = {"plain": 0, "by hand": lines_of(by_hand) + lines_of(stored), "FrozenPrefixCache": 1}


def trained(task: Task, way: str, epochs: int, data: Path, seed: int) -> dict[str, Any]:
    """Time of a fit, validation after each epoch included, and the accuracy at its end."""
    lightning.seed_everything(seed, workers=True, verbose=False)
    module = task.module(data, 1e-3)
    module.backbone.requires_grad_(False).eval()
    samples = task.samples(data, choosing=False)

    def train(module: FineTuning, samples: Any) -> None:
        trainer = silent_trainer(max_epochs=epochs)
        trainer.fit(module, datamodule=samples)
        reached.append(float(trainer.callback_metrics["accuracy"]))

    reached: list[float] = []
    with quiet():
        began, cpu_began = time.perf_counter(), time.process_time()
        WAYS[way](module, samples, train)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "accuracy": round(reached[0], 4)}


def table() -> str:
    """The medians, in Markdown."""
    kept = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    rows = [
        "| task | epochs | way | seconds | of plain | CPU seconds | accuracy, % | lines |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for task, epochs in sorted({(one["task"], one["epochs"]) for one in kept}):
        of = {
            way: [one for one in kept if (one["task"], one["epochs"], one["way"]) == (task, epochs, way)]
            for way in WAYS
        }
        middle = {way: statistics.median(one["seconds"] for one in ones) for way, ones in of.items() if ones}
        for way, seconds in middle.items():
            cpu = statistics.median(one["cpu_seconds"] for one in of[way])
            accuracy = 100 * statistics.fmean(one["accuracy"] for one in of[way])
            rows.append(
                f"| {task} | {epochs} | {way} | {seconds:.1f} | {seconds / middle['plain']:.2f} | {cpu:.1f} | "
                f"{accuracy:.1f} | {LINES[way]} |"
            )
    return "\n".join(rows) + "\n"


def main() -> None:
    """Add a line for each run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the data sets of the proof")
    parser.add_argument("--task", choices=TASKS, default="trashnet")
    parser.add_argument("--epochs", type=int, nargs="+", default=[10, 30])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print the table of the runs that are there, and stop")
    options = parser.parse_args()
    if not options.table:
        if options.data is None:
            parser.error("--data is needed")
        torch.set_num_threads(options.threads)
        for seed in range(options.runs):
            for epochs in options.epochs:
                for way in WAYS:
                    result = trained(TASKS[options.task], way, epochs, options.data, seed)
                    command = f"python -m benchmarks.frozen_backbone --data FOLDER --task {options.task}"
                    names = {"task": options.task, "epochs": epochs, "way": way, "seed": seed}
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(names | result | {"command": command, "about": about()}) + "\n")
                    print(names | result, flush=True)
    RESULTS.with_suffix(".md").write_text(table())
    print(table())


if __name__ == "__main__":
    main()
