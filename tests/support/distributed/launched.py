"""A training script as a user has it; the launcher starts it once, or once for each rank."""

import argparse
import json
import os
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing
from support.agreement import checked


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
        self.net = nn.Sequential(*layers, nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        return DataLoader(
            TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(2, (64,), generator=generator)), 8
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Tell(L.Callback):
    """Writes down what this rank has come to."""

    def __init__(self, folder, freezing):
        self.folder, self.freezing = folder, freezing

    def on_train_end(self, trainer, pl_module):
        told = {
            "rank": trainer.global_rank,
            "ranks": trainer.world_size,
            "weights": [value for p in pl_module.parameters() for value in p.flatten().tolist()],
            "events": [vars(event) for event in self.freezing.events],
            "workers": int(self.freezing.comparison.runner.worker is not None),
            "evaluations": self.freezing.savings().evaluations_done,
        }
        Path(self.folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(told))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("strategy")
    parser.add_argument("--nodes", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = FreezingPolicy(patience=1, pretrained=True, trial=False, peer_tolerance=0.9)
    freezing = checked(KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=2, deterministic=True))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2 // options.nodes,
        num_nodes=options.nodes,
        strategy=options.strategy,
        max_steps=20,
        callbacks=[freezing, Tell(options.folder, freezing)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=options.folder,
    )
    trainer.fit(Module())
    print("done", os.getpid())


if __name__ == "__main__":
    main()
