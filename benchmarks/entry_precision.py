"""Accuracy and disk with cached entries in fewer bits: whole runs of a workload of the proof.

python -m benchmarks.entry_precision --data FOLDER [--workload finetune_imagenette_resnet20] [--size tight] [--seeds 3]
"""

import argparse
import statistics
import tempfile

import hydra
import lightning

from benchmarks.proof.run import configured, freezing_of, quiet, steps_of, trainer_of
from lightning_egeria import FrozenPrefixCache

PRECISIONS = (None, "bf16", "int8")


def trained(options: argparse.Namespace, seed: int, precision: str | None) -> tuple[float, int, int]:
    """Accuracy at the end, bytes on disk for a sample, and the number of cached values."""
    config = configured(options.workload, options.size, options.data)
    lightning.seed_everything(seed, workers=True, verbose=False)
    datamodule = hydra.utils.instantiate(config.data)
    total, per_epoch = steps_of(config, datamodule)
    with tempfile.TemporaryDirectory() as folder, quiet():
        cached = FrozenPrefixCache(datamodule, cache_dir=folder, entry_precision=precision)
        freezing = freezing_of("cached", config, total, per_epoch, None)
        trainer = trainer_of(config, [freezing])
        trainer.fit(hydra.utils.instantiate(config.model), datamodule=cached)
        stats = cached.stats
        if stats.off is not None:
            raise SystemExit(f"the cache is off: {stats.off}")
        return float(trainer.callback_metrics["val/acc"]), stats.bytes_on_disk, stats.values


def main() -> None:
    """Print a line for each run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the data sets of the proof")
    parser.add_argument("--workload", default="finetune_imagenette_resnet20")
    parser.add_argument("--size", default="tight")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows: dict[str | None, list[tuple[float, int, int]]] = {precision: [] for precision in PRECISIONS}
    for seed in range(options.seeds):
        for precision in PRECISIONS:
            rows[precision].append(trained(options, seed, precision))
            accuracy, size, values = rows[precision][-1]
            print(f"seed {seed}, {precision}: {accuracy:.2%}, {size / 1e6:.1f} MB, {values} values", flush=True)
    print("\n| entry_precision | accuracy, % | vs. None | disk, MB |\n|---|---|---|---|")
    whole = [accuracy for accuracy, _, _ in rows[None]]
    for precision, found in rows.items():
        accuracies = [accuracy for accuracy, _, _ in found]
        differences = [ours - other for ours, other in zip(accuracies, whole, strict=True)]
        size = statistics.fmean(size for _, size, _ in found)
        own, difference = 100 * statistics.fmean(accuracies), 100 * statistics.fmean(differences)
        print(f"| {precision} | {own:.1f} | {difference:+.1f} | {size / 1e6:.1f} |")


if __name__ == "__main__":
    main()
