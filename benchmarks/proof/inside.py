"""Had the layers that froze converged? Each layer module's likeness to its final state, over a plain run.

    python -m benchmarks.proof.inside WORKLOAD --data FOLDER [--size small] [--seed 0]

A plain run is trained once more. Twenty times in it, and at its end, the boundary activations of the same validation
samples are taken; afterwards, linear CKA (Kornblith et al., ICML 2019) says how alike each is to that of the end. The
result lies beside those of the runs, where `make figures` draws it with the steps at which ours froze.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import hydra
import lightning
import torch
from torch import Tensor, nn

from benchmarks.proof.run import about, configured, quiet, steps_of, trainer_of
from benchmarks.proof.workloads import RESULTS, WORKLOADS, keep
from lightning_egeria import PrefixFreezing
from lightning_egeria.core.network.calls import boundary_activation

SAMPLES = 512
MOMENTS = 20


def centered_gram(activation: Tensor) -> Tensor:
    """Of `[samples, ...]`: inner products of the samples, with the mean sample taken off, `[samples, samples]`."""
    rows = activation.flatten(1).float()
    rows = rows - rows.mean(0)
    return rows @ rows.T


def linear_cka(first: Tensor, second: Tensor) -> float:
    """Of two centered Gram matrices; 1 where one activation is a rotated and scaled other.

    >>> a = torch.eye(4)
    >>> round(linear_cka(centered_gram(a), centered_gram(-2 * a)), 6)
    1.0
    """
    return float((first * second).sum() / (first.norm() * second.norm()))


@torch.no_grad()
def boundary_grams(
    freezing: PrefixFreezing, module: nn.Module, inputs: Tensor, gram: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Gram matrix of each boundary activation, `[samples, samples]`, as ``module`` stands there.

    Args:
        freezing: knows the layer modules.
        module: to run.
        inputs: of its samples.
        gram: makes a Gram matrix of an activation.
    """
    chain, grams, handles = freezing.freezer.chain, {}, []
    assert chain is not None
    for index, layer_module in enumerate(chain.layer_modules):

        def keep(_module: nn.Module, _inputs: Any, output: Any, index: int = index) -> None:
            grams[index] = gram(boundary_activation(output, chain.layer_modules[index].output_leaf))

        handles.append(module.get_submodule(layer_module.boundary).register_forward_hook(keep))
    try:
        module(inputs.to(next(module.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return [grams[index] for index in range(len(chain))]


class Looking(lightning.Callback):
    """Keeps the Gram matrices of all boundaries, a number of times in a run.

    Args:
        freezing: knows the layer modules.
        total: steps of the run.
        inputs: that the network is given each time.
    """

    def __init__(self, freezing: PrefixFreezing, total: int, inputs: Tensor) -> None:
        self.freezing, self.every, self.inputs = freezing, max(1, total // MOMENTS), inputs
        self.seen: list[tuple[int, list[Tensor]]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            self.seen.append((trainer.global_step, self.look(pl_module)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append((trainer.global_step, self.look(pl_module)))

    def look(self, pl_module: lightning.LightningModule) -> list[Tensor]:
        """Gram matrices of the boundaries, in evaluation mode."""
        was = pl_module.training
        pl_module.eval()
        try:
            return boundary_grams(self.freezing, pl_module, self.inputs, centered_gram)
        finally:
            pl_module.train(was)


def main() -> None:
    """Train, compare, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--size", default="small")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = configured(options.workload, options.size, options.data)
    lightning.seed_everything(options.seed, workers=True, verbose=False)
    datamodule = hydra.utils.instantiate(config.data)
    total, _ = steps_of(config, datamodule)
    model = hydra.utils.instantiate(config.model)
    validation = datamodule.val_dataloader().dataset
    places = range(0, len(validation), max(1, len(validation) // SAMPLES))
    inputs = torch.stack([validation[place][0] for place in list(places)[:SAMPLES]])
    freezing = PrefixFreezing()  # finds the layer modules, freezes nothing
    looking = Looking(freezing, total, inputs)
    with quiet():
        trainer_of(config, [freezing, looking], limit_val_batches=0).fit(model, datamodule=datamodule)
    final = looking.seen[-1][1]
    likeness = [
        {"step": step, "cka": [round(linear_cka(a, b), 5) for a, b in zip(grams, final, strict=True)]}
        for step, grams in looking.seen
    ]
    result = {
        "command": f"python -m benchmarks.proof.inside {options.workload} --size {options.size} --seed {options.seed}",
        "about": about(),
        "seed": options.seed,
        "layer_modules": freezing.layer_modules,
        "likeness": likeness,
    }
    path = RESULTS / options.workload / options.size / "inside.json"
    keep(path, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
