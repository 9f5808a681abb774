"""A linear layer on a pre-trained backbone that the user has frozen: plain runs and runs with the cache, in turns.

python -m benchmarks.frozen_backbone --data FOLDER [--workload trashnet_efficientnet] [--epochs 6] [--seeds 3]
"""

import argparse
import statistics
import tempfile
import time

import hydra
import lightning

from benchmarks.proof.run import configured, quiet, trainer_of
from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing
from lightning_egeria.demos.classifier import HEADS


def trained(options: argparse.Namespace, seed: int, cached: bool) -> tuple[float, float]:
    """Seconds of a fit, and the accuracy at its end."""
    config = configured(options.workload, options.size, options.data, [f"trainer.max_epochs={options.epochs}"])
    lightning.seed_everything(seed, workers=True, verbose=False)
    module, datamodule = hydra.utils.instantiate(config.model), hydra.utils.instantiate(config.data)
    for name, parameter in module.net.named_parameters():
        parameter.requires_grad_(name.startswith(HEADS))
    module.net.eval()
    with tempfile.TemporaryDirectory() as folder, quiet():
        data = FrozenPrefixCache(datamodule, cache_dir=folder) if cached else datamodule
        trainer = trainer_of(config, [KnowledgeGuidedFreezing()] if cached else [])
        started = time.perf_counter()
        trainer.fit(module, datamodule=data)
        seconds = time.perf_counter() - started
        if cached and data.stats.off is not None:
            raise SystemExit(f"the cache is off: {data.stats.off}")
    return seconds, float(trainer.callback_metrics["val/acc"])


def main() -> None:
    """Print a line for each run, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the data sets of the proof")
    parser.add_argument("--workload", default="trashnet_efficientnet")
    parser.add_argument("--size", default="small")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    times: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(options.seeds):
        for cached in (False, True):
            seconds, accuracy = trained(options, seed, cached)
            times[cached].append(seconds)
            print(f"seed {seed}, {'cached' if cached else 'plain'}: {seconds:.1f} s, {accuracy:.2%}", flush=True)
    ratios = [ours / plain for plain, ours in zip(times[False], times[True], strict=True)]
    print(f"cached / plain: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
