"""The accuracy of partial backprop on several ranks, beside controls that compute as much.

ResNet-20 is fine-tuned on Imagenette as in the proof, by processes that share a batch of 64. Beside it: a plain run
with as few steps as cost the same, and one with as small batches. The cost of a form is what all ranks compute, with a
backward of twice a forward: ``(1 + 2 share) / 3``, the share averaged over the ranks as `savings()` measures it.

python -m benchmarks.partial_quality --data FOLDER [--ranks 2] [--depths uniform] [--seeds 3]
"""

import argparse
import statistics
import tempfile

import hydra
import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from benchmarks.proof.run import configured, quiet
from lightning_egeria import StructuredPartialBackprop

WORKLOAD, SIZE = "finetune_imagenette_resnet20", "tight"


def trained(options, seed, *callbacks, steps=None, batch_size=64):
    """Accuracy on the validation images, and the number of steps."""
    local = max(1, round(batch_size / options.ranks))
    config = configured(WORKLOAD, SIZE, options.data, [f"data.batch_size={local}"])
    lightning.seed_everything(seed, verbose=False)
    arguments = {name: value for name, value in config.trainer.items() if name != "_target_"}
    arguments |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    arguments |= {"strategy": "ddp", "devices": options.ranks, "accelerator": "cpu", "num_sanity_val_steps": 0}
    if steps is not None:
        arguments |= {"max_epochs": -1, "max_steps": steps}
    datamodule = hydra.utils.instantiate(config.data)
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = lightning.Trainer(**arguments | {"default_root_dir": folder}, callbacks=list(callbacks))
        trainer.fit(hydra.utils.instantiate(config.model), datamodule=datamodule)
        if steps is not None:
            trainer.validate(trainer.lightning_module, datamodule=datamodule, verbose=False)
    return float(trainer.callback_metrics["val/acc"]), trainer.global_step


def main():
    """Print a line for each run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the data sets of the proof")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--depths", default="uniform")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = {}

    def note(method, accuracy, cost):
        rows.setdefault(method, []).append((accuracy, cost))
        tell(f"{method}: {accuracy:.2%} at {cost:.2f}")

    for seed in range(options.seeds):
        accuracy, steps = trained(options, seed)
        note("plain", accuracy, 1.0)
        partial = StructuredPartialBackprop(options.depths)
        accuracy, _ = trained(options, seed, partial)
        shares = [rank.backward_share for rank in partial.savings().ranks]
        cost = of_first_rank((1 + 2 * statistics.fmean(shares)) / 3)  # shares are measured times
        note(options.depths, accuracy, cost)
        note("plain, as short", trained(options, seed, steps=round(cost * steps))[0], cost)
        note("plain, smaller batches", trained(options, seed, batch_size=round(64 * cost))[0], cost)
    tell("\n| | cost | accuracy, % | vs. plain |\n|---|---|---|---|")
    plain = [accuracy for accuracy, _ in rows["plain"]]
    for method, found in rows.items():
        accuracies, costs = zip(*found, strict=True)
        differences = [ours - other for ours, other in zip(accuracies, plain, strict=True)]
        cells = [f"{statistics.fmean(costs):.2f}", spread(accuracies), "" if method == "plain" else spread(differences)]
        tell(f"| {method} | {' | '.join(cells)} |")


def of_first_rank(value):
    """The number that the first rank has: all must take as many steps."""
    shared = torch.tensor(value, dtype=torch.float64)
    torch.distributed.broadcast(shared, 0)
    return float(shared)


def spread(values):
    """Mean and standard deviation, in per cent."""
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{deviation}"


def tell(line):
    """Print on the first rank."""
    if rank_zero_only.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
