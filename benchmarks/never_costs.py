"""What FrozenPrefixCache costs where it cannot help: CPU seconds of whole fits with it, over those without it.

Each job trains twice a pair, once plainly and once with the cache, in turns, in this process on one thread. Printed are
the CPU seconds of the plain fit (workers included, medians), the median ratio, the seconds that the cache saved by
these fits and by its own account, and what it did. A small frozen part comes first in each network. Results are added
to `benchmarks/proof/results/never_costs.jsonl`.

    python -m benchmarks.never_costs [--jobs NAME ...] [--pairs 5]
    python -m benchmarks.never_costs --table
"""

import argparse
import contextlib
import io
import json
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from benchmarks.proof.run import about, quiet
from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing

RESULTS = Path(__file__).parent / "proof" / "results" / "never_costs.jsonl"
TABLE = RESULTS.with_suffix(".md")


class Job(lightning.LightningModule):
    """A frozen part and a head that trains."""

    def __init__(self, frozen: nn.Module | None, head: nn.Module, mixes: bool = False, trains: bool = False) -> None:
        super().__init__()
        self.frozen, self.head, self.mixes = frozen, head, mixes
        if frozen is not None:
            frozen.requires_grad_(trains).train(trains)
        self.trains = trains

    def on_train_epoch_start(self) -> None:
        if self.frozen is not None and not self.trains:
            self.frozen.eval()

    def forward(self, x):
        if isinstance(x, dict):
            states = self.frozen(x["ids"], src_key_padding_mask=x["padding"])
            return self.head(states[:, 0])
        return self.head(self.frozen(x) if self.frozen is not None else x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.mixes:
            share = torch.rand(())
            x = share * x + (1 - share) * x.flip(0)
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.01)


class Encoder(nn.Module):
    """A small text encoder."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True) for _ in range(layers)
        )

    def forward(self, ids, src_key_padding_mask):
        states = self.embedding(ids)
        for layer in self.layers:
            states = layer(states, src_key_padding_mask=src_key_padding_mask)
        return states


class Texts(Dataset):
    """Sentences of 4 to 40 tokens."""

    def __init__(self, samples: int) -> None:
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(4, 41, (samples,), generator=draw).tolist()
        self.rows = [(torch.randint(1, 1000, (length,), generator=draw), length % 3) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def padded(samples, to: int | None = None):
    """Texts of the length of the longest, or of a fixed one."""
    ids = nn.utils.rnn.pad_sequence([text for text, _ in samples], batch_first=True)
    if to is not None:
        ids = nn.functional.pad(ids, (0, to - ids.shape[1]))
    return {"ids": ids, "padding": ids == 0}, torch.tensor([label for _, label in samples])


class Cropped(Dataset):
    """Images with a random crop."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index):
        top, left = torch.randint(5, (2,)).tolist()
        return nn.functional.pad(self.images[index], (2, 2, 2, 2))[:, top : top + 32, left : left + 32], index % 3


class Stream(IterableDataset):
    """Data without indices."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __iter__(self):
        return ((image, at % 3) for at, image in enumerate(self.images))


def images(samples: int, size: int = 32) -> TensorDataset:
    """Images of noise."""
    rows = torch.randn(samples, 3, size, size, generator=torch.Generator().manual_seed(0))
    return TensorDataset(rows, torch.arange(samples) % 3)


def vectors(samples: int, width: int) -> TensorDataset:
    """Rows of noise."""
    rows = torch.randn(samples, width, generator=torch.Generator().manual_seed(0))
    return TensorDataset(rows, torch.arange(samples) % 3)


def resnet() -> nn.Module:
    """A ResNet-10 without a head."""
    return timm.create_model("resnet10t", num_classes=0)


def _loader(data: Any, size: int = 32, **options: Any) -> DataLoader:
    options.setdefault("shuffle", not isinstance(data, IterableDataset))
    return DataLoader(data, size, **options)


def _mlp(width: int = 512) -> nn.Module:
    return nn.Linear(width, 3)


# A job returns the module, the training loader, the validation loader or None, and the number of epochs.
JOBS: dict[str, Callable[[], tuple[Job, DataLoader, DataLoader | None, int]]] = {
    "nothing frozen, tiny network": lambda: (
        Job(None, nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))),
        _loader(vectors(4000, 64)),
        None,
        5,
    ),
    "frozen linear layer, fast step": lambda: (
        Job(nn.Linear(64, 64), nn.Linear(64, 3)),
        _loader(vectors(4000, 64)),
        None,
        5,
    ),
    "one epoch": lambda: (Job(resnet(), _mlp()), _loader(images(1500)), None, 1),
    "two epochs": lambda: (Job(resnet(), _mlp()), _loader(images(800)), None, 2),
    "validation four times as large": lambda: (
        Job(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten()), nn.Linear(12544, 3)),
        _loader(images(600)),
        _loader(images(2400), shuffle=False),
        4,
    ),
    "large outputs of a cheap layer": lambda: (
        Job(nn.Conv2d(3, 32, 3), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))),
        _loader(images(1500)),
        None,
        5,
    ),
    "texts of varying length": lambda: (
        Job(Encoder(), nn.Linear(256, 3)),
        _loader(Texts(600), collate_fn=padded),
        None,
        3,
    ),
    "texts of varying length, validation": lambda: (
        Job(Encoder(), nn.Linear(256, 3)),
        _loader(Texts(300), collate_fn=padded),
        _loader(Texts(600), collate_fn=padded, shuffle=False),
        3,
    ),
    "random augmentation": lambda: (Job(resnet(), _mlp()), _loader(Cropped(images(600).tensors[0])), None, 3),
    "inputs mixed at random": lambda: (Job(resnet(), _mlp(), mixes=True), _loader(images(600)), None, 3),
    "iterable data": lambda: (Job(resnet(), _mlp()), _loader(Stream(images(600).tensors[0])), None, 3),
    "dropout in training mode": lambda: (
        Job(None, nn.Sequential(_fixed(nn.Sequential(nn.Linear(256, 512), nn.Dropout(0.1))), nn.Linear(512, 3))),
        _loader(vectors(4000, 256)),
        None,
        4,
    ),
    "two workers, small images": lambda: (
        Job(resnet(), _mlp()),
        _loader(images(600), num_workers=2, persistent_workers=True),
        None,
        3,
    ),
    "freezing callback, three epochs": lambda: (
        Job(nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6))), _mlp(256), trains=True),
        _loader(vectors(6000, 256)),
        _loader(vectors(1000, 256), shuffle=False),
        3,
    ),
}


def _fixed(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)


def fitted(name: str, cached: bool) -> tuple[float, Any, list[torch.Tensor]]:
    """CPU seconds of a fit, the statistics of the cache, and the trained weights."""
    torch.manual_seed(0)
    module, train, validation, epochs = JOBS[name]()
    torch.manual_seed(1)
    callbacks = [KnowledgeGuidedFreezing(background=False)] if name.startswith("freezing callback") else []
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=callbacks,
    )
    with quiet(), contextlib.redirect_stdout(io.StringIO()):
        data: Any = FrozenPrefixCache(train, val_dataloaders=validation) if cached else None
        started = cpu_seconds()
        if cached:
            trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, train, validation)
        del train, validation
        seconds = cpu_seconds() - started
    return seconds, data, [one.detach().clone() for one in module.parameters()]


def measured(name: str, count: int) -> dict[str, Any]:
    """Pairs of fits of a job, and what the cache did.

    Raises:
        SystemExit: the weights differ.
    """
    pairs = []
    for at in range(count + 1):
        order = (False, True) if at % 2 else (True, False)
        found = {cached: fitted(name, cached) for cached in order}
        (plain, _, before), (ours, data, after) = found[False], found[True]
        if not all(map(torch.equal, before, after)):
            raise SystemExit(f"{name}: the weights differ")
        pairs.append((plain, ours, data.stats.seconds_saved + data.validation_stats.seconds_saved))
    stats = data.stats
    served = stats.hits + stats.advanced
    return {
        "job": name,
        "pairs": pairs[1:],  # the first one imports and allocates
        "done": stats.off or f"{served} of {served + stats.misses} from entries",
        "command": f"python -m benchmarks.never_costs --pairs {count}",
        "about": about(),
    }


def row_of(record: dict[str, Any]) -> str:
    """A line of the table."""
    pairs = record["pairs"]
    ratios = [ours / plain for plain, ours, _ in pairs]
    row = [
        f"{statistics.median(plain for plain, _, _ in pairs):.2f}",
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        f"{round(statistics.median(plain - ours for plain, ours, _ in pairs), 2) or 0.0:.2f}",
        f"{round(statistics.median(claimed for _, _, claimed in pairs), 2) or 0.0:.2f}",
    ]
    return f"| {' | '.join([record['job'], *row])} |"


def table() -> str:
    """The latest measurement of each job, in Markdown."""
    latest = {one["job"]: one for one in map(json.loads, RESULTS.read_text().splitlines())}
    commits = {one["commit"] if "commit" in one else one["about"]["commit"][:7] for one in latest.values()}
    names = "| job | plain, CPU s | with the cache / plain | range | saved, s | claimed, s |"
    made = f"Made by `python -m benchmarks.never_costs`, commit {', '.join(sorted(commits))}."
    return (
        "\n".join(
            [
                names,
                "|---|---:|---:|---|---:|---:|",
                *(row_of(latest[name]) for name in JOBS if name in latest),
                "",
                made,
            ]
        )
        + "\n"
    )


def main() -> None:
    """Measure, add lines to the results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--table", action="store_true", help="write the table from the results, and measure nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in [] if options.table else options.jobs:
        record = measured(name, options.pairs)
        print(row_of(record), record["done"], flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(record) + "\n")
    TABLE.write_text(table())
    print(table())


if __name__ == "__main__":
    main()
