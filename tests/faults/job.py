"""The training job that faults are put into: small, complete, and the same every time.

It freezes, goes deeper, unfreezes and freezes again by what a reference model answers, and takes from the cache what it
can. Nothing in it is random but through its seed, and it starts again from the newest checkpoint that it finds.
"""

import copy
import dataclasses
import datetime
import json
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import xxhash
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing
from lightning_egeria.caching import policy
from lightning_egeria.core.training.freezer import Decision
from support import untimed

SAMPLES, BATCH, EPOCHS = 40, 8, 10
STEPS = SAMPLES // BATCH * EPOCHS
EVERY = 2  # steps between evaluations
# Answers of the reference after which the frozen depth changes: freeze, deeper, release, freeze again.
SCRIPT = {2: 1, 5: 2, 10: 0, 13: 2}
RESULT, CHECKPOINT, CACHE = "result.json", "last.ckpt", "cache"

UNTIMED = {"COMPARED_BATCHES": sys.maxsize, **untimed.FREE}


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.a = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, stride=2), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(self.stem(x))).mean((2, 3)))


class Module(L.LightningModule):
    """Classifies; `training_step` can be made to misbehave."""

    def __init__(self, net: nn.Module, at_step: Callable[[int, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.net = net
        self.at_step = at_step

    def training_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss if self.at_step is None else self.at_step(self.global_step, loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class ByAnswers:
    """Follows a script that counts what the reference has answered, so that nothing happens without it."""

    wants_reference, holds_reference = True, False

    def __init__(self) -> None:
        self.answers = 0

    def start(self, max_depth: int) -> None:
        pass

    def observe(
        self,
        step: int,
        plasticity: Sequence[float] | None,
        learning_rate: float,
        loss: float | None,
        layer_shares: Sequence[float] | None = None,
    ) -> Decision | None:
        if plasticity is None:
            return None
        self.answers += 1
        depth = self.depth_after(self.answers)
        return None if depth is None else Decision(depth, f"answer {self.answers}")

    def depth_after(self, answers: int) -> int | None:
        """What to change the frozen depth to after so many answers."""
        return SCRIPT.get(answers)

    def state_dict(self) -> dict[str, Any]:
        return {"answers": self.answers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.answers = state["answers"]


class EpochOrder(Sampler[int]):
    """A permutation that follows from the epoch alone, so that a run that starts again has the same."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return self.count


class Saves(L.Callback):
    """Keeps the newest checkpoint, whole at every moment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        draft = self.path.with_suffix(".draft")
        before, tempfile.tempdir = tempfile.tempdir, str(self.path.parent)  # Lightning's own file, if it is killed here
        trainer.save_checkpoint(draft)
        tempfile.tempdir = before
        if trainer.is_global_zero:
            draft.replace(self.path)


class At(L.Callback):
    """Calls `act(freezing)` after a step, or after each if `step` is None."""

    def __init__(self, act: Callable[[KnowledgeGuidedFreezing], None], step: int | None = None) -> None:
        self.act, self.step = act, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.step in (None, trainer.global_step):
            (freezing,) = (callback for callback in trainer.callbacks if isinstance(callback, KnowledgeGuidedFreezing))
            self.act(freezing)


@dataclasses.dataclass
class Job:
    """One start of the training job.

    Args:
        folder: for its checkpoint, result, temporary files and, unless given, cache.
        cached: whether through the cache.
        cache_dir: of the cache.
        background: whether the reference has a process.
        deterministic: waits for what it answers.
        timeout_s: for it.
        policy: that decides; None: `ByAnswers`.
        net: that is trained; None: `Net` from the seed.
        dataset: that it is trained on; None: images from the seed.
        sampler: of their order; None: `EpochOrder`.
        batch_size: of the loader.
        epochs: of the training.
        at_step: changes the loss.
        callbacks: more of them.
        saves: whether it keeps a checkpoint.
        checkpoint: where; None: in the folder.
        freezing: whether with the callback.
        ranks: processes of the job, of which this is one.
        exchange_s: that it waits for the others.
    """

    folder: Path
    cached: bool = True
    cache_dir: Path | None = None
    background: bool = False
    deterministic: bool = True
    timeout_s: float = 60.0
    policy: Any = None
    net: nn.Module | None = None
    dataset: Dataset[Any] | None = None
    sampler: Sampler[int] | None = None
    batch_size: int = BATCH
    epochs: int = EPOCHS
    at_step: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    callbacks: Sequence[L.Callback] = ()
    saves: bool = True
    checkpoint: Path | None = None
    freezing: bool = True
    ranks: int = 1
    exchange_s: float = 60.0

    def run(self) -> dict[str, Any]:
        """Train, and keep what came out in the folder, whatever that is.

        Returns:
            What is kept: how it ended, the steps, a fingerprint of the parameters, the freezes, what was told, what the
            cache did, and the threads that are left.
        """
        temporary = self.folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir, os.environ["TMPDIR"] = str(temporary), str(temporary)
        (self.folder / RESULT).unlink(missing_ok=True)
        L.seed_everything(0, verbose=False)
        module = Module(copy.deepcopy(self.net) if self.net is not None else Net(), self.at_step)
        dataset = self.dataset if self.dataset is not None else images()
        sampler = self.sampler if self.sampler is not None else EpochOrder(len(dataset))
        loader: Any = DataLoader(dataset, self.batch_size, sampler=sampler)
        if self.cached:
            cache_dir = self.cache_dir if self.cache_dir is not None else self.folder / CACHE
            loader = FrozenPrefixCache(loader, cache_dir=cache_dir, min_free_bytes=0)
        freezing = KnowledgeGuidedFreezing(
            self.policy if self.policy is not None else ByAnswers(),
            evaluate_every_n_steps=EVERY,
            reference_precision="float32",
            background=self.background,
            deterministic=self.deterministic,
            timeout_s=self.timeout_s,
        )
        checkpoint = self.checkpoint if self.checkpoint is not None else self.folder / CHECKPOINT
        timeout = datetime.timedelta(seconds=self.exchange_s)
        callbacks = [*([freezing] if self.freezing else []), *self.callbacks]
        if self.saves:
            callbacks.append(Saves(checkpoint))
        trainer = L.Trainer(
            max_epochs=self.epochs,
            accelerator="cpu",
            devices=self.ranks,
            strategy=DDPStrategy(timeout=timeout) if self.ranks > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            callbacks=callbacks,
        )
        ended = "well"
        with warnings.catch_warnings(record=True) as told, mock.patch.multiple(policy, **UNTIMED):
            warnings.simplefilter("always")
            try:
                trainer.fit(module, loader, ckpt_path=checkpoint if checkpoint.is_file() else None)
            except BaseException as error:  # a signal too
                ended = f"{type(error).__name__}: {error}"
        result = {
            "ended": ended,
            "steps": trainer.global_step,
            "parameters": fingerprint(module),
            "finite": all(bool(value.isfinite().all()) for value in module.state_dict().values()),
            "answers": getattr(freezing.active_policy, "answers", 0),
            "events": [[event.step, event.depth] for event in freezing.events],
            "told": [str(warning.message) for warning in told],
            "cache": vars(loader.stats) if self.cached else None,
            "threads": sorted(t.name for t in threading.enumerate() if t is not threading.main_thread()),
        }
        (self.folder / RESULT).write_text(json.dumps(result))
        return result


def images(count: int = SAMPLES, seed: int = 0) -> TensorDataset:
    """Noise with labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 8, 8, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (count,), generator=generator))


def fingerprint(module: nn.Module) -> str:
    """Of every parameter and buffer, bit for bit."""
    digest = xxhash.xxh3_128()
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
