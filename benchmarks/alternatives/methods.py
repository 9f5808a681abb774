"""What a practitioner would do, each as the code that one would write: the lines of each function are counted."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import lightning
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.alternatives.tasks import Data, FineTuning, MeanPooled, Task
from lightning_egeria import FreezingPolicy, FrozenPrefixCache, KnowledgeGuidedFreezing, SelectiveBackprop


class Fit(Protocol):
    """Trains, and notes time and accuracy after each epoch."""

    def __call__(self, module: lightning.LightningModule, data: Any, *callbacks: Any, **trainer: Any) -> None: ...


class Run:
    """What a method is given.

    Attributes:
        task: what is trained.
        rate: learning rate, of the task's.
        fit: trains.
        data: the user's data module.
        steps: of a shortened run.
    """

    def __init__(self, task: Task, folder: Path, rate: float, fit: Fit, choosing: bool, steps: int | None) -> None:
        self.task, self.folder, self.rate, self.fit, self.steps = task, folder, rate, fit, steps
        self.data = task.samples(folder, choosing)

    def module(self, one_cycle: bool = True) -> FineTuning:
        return self.task.module(self.folder, self.rate, one_cycle)


METHODS: dict[str, "Method"] = {}


class Method:
    """One way to fine-tune.

    Attributes:
        train: trains with it.
        title: in tables.
        depth: whether the user has to know how deep to freeze.
        lines: of Python that the user writes beyond a plain run.
        scale: factor of the task's learning rates; adapters and heads learn faster than whole networks.
        text_only: whether it is for texts only.
    """

    def __init__(
        self, title: str, depth: bool = False, scale: float = 1.0, text_only: bool = False, parts: tuple[Any, ...] = ()
    ) -> None:
        self.title, self.depth, self.scale, self.text_only, self.parts = title, depth, scale, text_only, parts

    def __call__(self, train: Callable[[Run], None]) -> Callable[[Run], None]:
        self.train = train
        METHODS[train.__name__] = self
        self.lines = sum(lines_of(part) for part in (train, *self.parts)) - _PLAIN
        return train


def lines_of(part: Any) -> int:
    """Lines of code, without decorators, names of functions, docstrings, comments and empty lines."""
    lines, quoted = 0, False
    for line in inspect.getsource(part).splitlines():
        text = line.strip()
        quotes = text.count('"""')
        if quoted or quotes:
            quoted ^= quotes == 1
        elif text and not text.startswith(("@", "#", "def ")):
            lines += 1
    return lines


_PLAIN = 1  # of `plain`


@Method("plain")
def plain(run: Run) -> None:
    run.fit(run.module(), run.data)


@Method("plain, shortened to our time")
def shortened(run: Run) -> None:
    run.fit(run.module(), run.data, max_epochs=-1, max_steps=run.steps)


@Method("BackboneFinetuning, backbone from half of the run on", depth=False)
def backbone_finetuning(run: Run) -> None:
    run.fit(
        run.module(one_cycle=False),  # a schedule does not take the parameters that join later
        run.data,
        BackboneFinetuning(run.task.epochs // 2, backbone_initial_lr=run.rate, lambda_func=lambda epoch: 1.0),
    )


@Method("LP-FT: the head, then everything")
def lp_ft(run: Run) -> None:
    module = run.module()
    module.backbone.requires_grad_(False)
    run.fit(module, run.data, max_epochs=run.task.epochs // 2)
    module.backbone.requires_grad_(True)
    run.fit(module, run.data, max_epochs=run.task.epochs - run.task.epochs // 2)


def blocks_of(backbone: nn.Module) -> list[nn.Module]:
    """From the input to the output."""
    if isinstance(backbone, MeanPooled):
        return [backbone.bert.embeddings, *backbone.bert.encoder.layer]
    return [nn.ModuleList([backbone.conv_stem, backbone.bn1]), *backbone.blocks]


class Gradual(lightning.Callback):
    """One more part trains in each epoch, from the end."""

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        blocks = blocks_of(pl_module.backbone)
        share = (trainer.current_epoch + 1) / trainer.max_epochs
        trained = round(share * len(blocks))
        for index, block in enumerate(blocks):
            block.requires_grad_(index >= len(blocks) - trained)


@Method("gradual unfreezing", parts=(Gradual, blocks_of))
def gradual(run: Run) -> None:
    run.fit(run.module(), run.data, Gradual())


def stored(part: nn.Module, loader: DataLoader[Any]) -> TensorDataset:
    """Outputs of a frozen part, and labels."""
    part.eval()
    with torch.no_grad():
        outputs = [(part(inputs), labels) for inputs, labels in loader]
    return TensorDataset(torch.cat([one for one, _ in outputs]), torch.cat([one for _, one in outputs]))


@Method("linear probe on stored features", scale=10.0, parts=(stored,))
def linear_probe(run: Run) -> None:
    module = run.module()
    backbone, module.backbone = module.backbone, nn.Identity()
    loaders = run.data.train_dataloader(), run.data.val_dataloader()
    train, val = (stored(backbone, loader) for loader in loaders)
    run.fit(module, Data(train, val, run.task.batch_size, None), max_epochs=10 * run.task.epochs)


def lora_in(run: Run, layers: list[int] | None) -> FineTuning:
    from peft import LoraConfig, get_peft_model

    module = run.module()
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], layers_to_transform=layers)
    module.backbone.bert = get_peft_model(module.backbone.bert, config)
    return module


@Method("LoRA in all layers", scale=10.0, text_only=True, parts=(lora_in,))
def lora(run: Run) -> None:
    run.fit(lora_in(run, None), run.data)


@Method("LoRA in the last third", depth=True, scale=10.0, text_only=True, parts=(lora_in,))
def lora_third(run: Run) -> None:
    run.fit(lora_in(run, [4, 5]), run.data)


@Method("LoRA in the last third, with our cache", depth=True, scale=10.0, text_only=True, parts=(lora_in,))
def lora_third_cached(run: Run) -> None:
    run.fit(lora_in(run, [4, 5]), FrozenPrefixCache(run.data))


class FrontHalfOfBert(nn.Module):
    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.layers = bert.embeddings, bert.encoder.layer[:3]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        real = tokens != 0
        x = self.embeddings(input_ids=tokens)
        for layer in self.layers:
            x = first_of(layer(x, attention_mask=real[:, None, None, :]))
        x = nn.functional.pad(x * real.unsqueeze(-1), (0, 0, 0, 64 - x.shape[1]))
        return torch.cat([x, nn.functional.pad(real, (0, 64 - real.shape[1])).unsqueeze(-1).float()], dim=-1)


class BackHalfOfBert(nn.Module):
    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.layers = bert.encoder.layer[3:]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        real = states[..., -1].bool()
        longest = int(real.sum(1).max())
        x, real = states[:, :longest, :-1], real[:, :longest]
        for layer in self.layers:
            x = first_of(layer(x, attention_mask=real[:, None, None, :]))
        return (x * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)


def first_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def halves_of(backbone: nn.Module) -> tuple[nn.Module, nn.Module]:
    if isinstance(backbone, MeanPooled):
        return FrontHalfOfBert(backbone.bert), BackHalfOfBert(backbone.bert)
    front = nn.Sequential(backbone.conv_stem, backbone.bn1, *backbone.blocks[:4])
    back = nn.Sequential(*backbone.blocks[4:], backbone.conv_head, backbone.bn2, backbone.global_pool)
    return front, back


@Method(
    "front half frozen, cache written by hand",
    depth=True,
    parts=(stored, halves_of, FrontHalfOfBert, BackHalfOfBert),
)
def by_hand(run: Run) -> None:
    module = run.module()
    front, module.backbone = halves_of(module.backbone)
    loaders = run.data.train_dataloader(), run.data.val_dataloader()
    train, val = (stored(front, loader) for loader in loaders)
    run.fit(module, Data(train, val, run.task.batch_size, None))


@Method("front half frozen, with our cache", depth=True, parts=(blocks_of,))
def half_cached(run: Run) -> None:
    module = run.module()
    blocks = blocks_of(module.backbone)
    for block in blocks[: (len(blocks) + 1) // 2]:
        block.requires_grad_(False).eval()
    run.fit(module, FrozenPrefixCache(run.data))


@Method("ours, default arguments")
def ours(run: Run) -> None:
    run.fit(run.module(), FrozenPrefixCache(run.data), KnowledgeGuidedFreezing())


@Method("ours, pretrained=True, max_loss_points=2")
def ours_tuned(run: Run) -> None:
    callback = KnowledgeGuidedFreezing(FreezingPolicy(pretrained=True), max_loss_points=2)
    run.fit(run.module(), FrozenPrefixCache(run.data), callback)


@Method("ours, tuned, with Selective-Backprop")
def ours_selective(run: Run) -> None:
    callback = KnowledgeGuidedFreezing(FreezingPolicy(pretrained=True), max_loss_points=2)
    run.fit(run.module(), SelectiveBackprop(FrozenPrefixCache(run.data)), callback)
