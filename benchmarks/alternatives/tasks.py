"""Small fine-tuning tasks with a pre-trained network, written as a user would write them."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from lightning_egeria.demos.classifier import load_weights
from lightning_egeria.demos.intents import IntentData, padded

# Samples of the training set that choose the learning rate; the validation set gives the figures only.
CHOOSING = 300


class MeanPooled(nn.Module):
    """Hugging Face's BERT, and the mean of the embeddings of a sentence's tokens."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `[B, T]`, padded with 0, to `[B, width]`."""
        real = (tokens != 0).unsqueeze(-1)
        states = self.bert(input_ids=tokens, attention_mask=real[..., 0].long()).last_hidden_state
        return (states * real).sum(1) / real.sum(1)


class FineTuning(lightning.LightningModule):
    """A backbone and a linear layer, trained with AdamW and one cycle; the head learns ten times as fast."""

    def __init__(self, backbone: nn.Module, width: int, num_classes: int, lr: float, one_cycle: bool = True) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, num_classes)
        self.lr, self.one_cycle, self.correct = lr, one_cycle, []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.backbone(inputs))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        slow = [one for one in self.backbone.parameters() if one.requires_grad]
        groups = [{"params": self.head.parameters(), "lr": 10 * self.lr}, {"params": slow, "lr": self.lr}]
        optimizer = torch.optim.AdamW([one for one in groups if one["params"] != []], weight_decay=0.01)
        if not self.one_cycle:
            return optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(lightning.LightningDataModule):
    """A part of the training set, and what validates."""

    def __init__(
        self,
        train: Dataset[Any],
        val: Dataset[Any],
        batch_size: int,
        collate_fn: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__()
        self.train_set, self.val_set, self.batch_size, self.collate_fn = train, val, batch_size, collate_fn

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True, collate_fn=self.collate_fn)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, self.batch_size, collate_fn=self.collate_fn)


def silent_trainer(**arguments: Any) -> lightning.Trainer:
    """A Trainer on the CPU that writes and prints nothing."""
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **arguments,
    )


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        is_text: whether the network is MiniLM (all-MiniLM-L6-v2) as a `BertModel`, or tf_efficientnet_lite0.
        folder: in the folder with all data.
        num_classes: of the data.
        train_size: images or texts to train on.
        val_size: images or texts that the figure is measured on.
        epochs: of a run.
        rates: learning rates among which each method chooses; the head learns ten times as fast. Runs at a further
            rate are in the files of TrashNet and Banking77, from another machine, and make no table there.
    """

    is_text: bool
    folder: str
    num_classes: int
    train_size: int
    val_size: int
    epochs: int
    rates: tuple[float, ...]

    @property
    def width(self) -> int:
        return 384 if self.is_text else 1280

    @property
    def batch_size(self) -> int:
        return 32

    def backbone(self, data: Path) -> nn.Module:
        """The network, without a head."""
        if not self.is_text:
            net = timm.create_model("tf_efficientnet_lite0", num_classes=0)
            load_weights(net, str(data / "checkpoints/tf_efficientnet_lite0.safetensors"))
            return net
        from transformers import BertConfig, BertModel

        bert = BertModel(
            BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536),
            add_pooling_layer=False,
        )
        raw = load_file(data / "checkpoints/all_minilm_l6_v2_int8.safetensors")
        scaled = {
            name: value.float() * raw[f"{name}.scale"].float() if value.dtype == torch.int8 else value.float()
            for name, value in raw.items()
            if not name.endswith(".scale") and not name.startswith("pooler.")
        }
        bert.load_state_dict(scaled)
        return MeanPooled(bert)

    def module(self, data: Path, lr: float, one_cycle: bool = True) -> FineTuning:
        """What the user trains."""
        return FineTuning(self.backbone(data), self.width, self.num_classes, lr, one_cycle)

    def samples(self, data: Path, choosing: bool) -> Data:
        """The user's data module.

        Args:
            data: folder with all data.
            choosing: whether a part of the training set that is not trained on validates.
        """
        train: Dataset[Any]
        val: Dataset[Any]
        if self.is_text:
            texts = IntentData(
                str(data / self.folder), str((data / "checkpoints/all_minilm_l6_v2_vocab.txt").absolute()), longest=64
            )
            texts.setup("fit")
            train, val, collate_fn = texts.train_set, texts.val_set, padded
        else:
            look = transforms.Compose(
                [
                    transforms.Resize((96, 96)),
                    transforms.ToTensor(),
                    transforms.Normalize((0.5,) * 3, (0.5,) * 3),
                ]
            )
            train, val = (ImageFolder(str(data / self.folder / split), look) for split in ("train", "val"))
            collate_fn = None
        order = random.Random(0).sample(range(len(train)), self.train_size + CHOOSING)
        checked = random.Random(0).sample(range(len(val)), min(self.val_size, len(val)))
        held = Subset(train, order[self.train_size :]) if choosing else Subset(val, checked)
        return Data(Subset(train, order[: self.train_size]), held, self.batch_size, collate_fn)


TASKS = {
    "trashnet": Task(False, "trashnet", 6, 800, 497, 5, (1e-4, 3e-4, 1e-3)),
    "imagenette": Task(False, "imagenette", 10, 800, 500, 5, (1e-4, 3e-4, 1e-3, 3e-3)),
    "banking77": Task(True, "banking77", 77, 600, 300, 4, (3e-5, 1e-4, 3e-4)),
    "newsgroups": Task(True, "newsgroups", 20, 600, 300, 4, (3e-5, 1e-4, 3e-4, 1e-3)),
}
