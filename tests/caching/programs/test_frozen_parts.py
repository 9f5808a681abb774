"""Frozen parts of networks that people train, without a callback that freezes."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from support.caching.parts import BATCH, CLASSES, SAMPLES, images, loader, on

SIZE, WIDTH, EPOCHS = 8, 16, 8


class VisionTransformer(nn.Module):
    """Has a class token and register tokens."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 4, 4)
        self.tokens = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True, norm_first=True) for _ in range(2))
        )

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.blocks(torch.cat([self.tokens.expand(len(x), -1, -1), x], 1))


class TextEncoder(nn.Module):
    """Has dropout, if it is in training mode."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, WIDTH, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, ids, mask):
        return self.layer(self.table(ids), src_key_padding_mask=~mask)


class Trains(L.LightningModule):
    """Trains what requires a gradient, by the loss of a batch."""

    def training_step(self, batch, batch_idx):
        return self.loss_of(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss_of(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Probed(Trains):
    """A linear layer on the class token and the mean of the patches of a frozen vision transformer."""

    def __init__(self):
        super().__init__()
        self.backbone = VisionTransformer().requires_grad_(False).eval()
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def loss_of(self, batch):
        tokens = self.backbone(batch["image"])
        return F.cross_entropy(self.head(torch.cat([tokens[:, 0], tokens[:, 4:].mean(1)], 1)), batch["label"])


class Paired(Trains):
    """A frozen image tower, a text tower that trains, and a loss of all pairs."""

    def __init__(self):
        super().__init__()
        self.images, self.texts = VisionTransformer().requires_grad_(False).eval(), TextEncoder()
        self.from_image, self.from_text = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def loss_of(self, batch):
        x = F.normalize(self.from_image(self.images(batch["image"])[:, 0]), dim=-1)
        y = F.normalize(self.from_text(self.texts(batch["ids"], batch["mask"])[:, 0]), dim=-1)
        wanted = torch.arange(len(x))
        return F.cross_entropy(x @ y.T, wanted) + F.cross_entropy(y @ x.T, wanted)


class Embedded(Trains):
    """Only the table is frozen. Its mode changes between training and validation, and its output does not."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, WIDTH).requires_grad_(False)
        self.lstm, self.head = nn.LSTM(WIDTH, 8, batch_first=True), nn.Linear(8, CLASSES)

    def loss_of(self, batch):
        return F.cross_entropy(self.head(self.lstm(self.table(batch["ids"]))[1][0][0]), batch["label"])


class Described(Dataset):
    """Dictionaries of an image, a text, a name and a label."""

    def __init__(self, samples=SAMPLES, seed=1):
        self.images, self.labels = images(samples, size=SIZE, seed=seed).tensors
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 30, (samples, 6), generator=draw)
        self.lengths = torch.randint(2, 7, (samples,), generator=draw)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        mask = torch.arange(6) < self.lengths[at]
        text = {"ids": self.ids[at] * mask, "mask": mask, "name": f"sample {at}"}
        return text | {"image": self.images[at], "label": self.labels[at]}


def check(compare, module):
    """Assert that both loaders are served from the second epoch on, but for one batch that is compared."""

    def program(run):
        val = loader(Described(12, seed=2), shuffle=False)
        run.fit(module(), loader(Described()), val=val, schedule={}, max_epochs=EPOCHS)

    (cached,) = compare(program, freezes=False).caches
    assert cached.stats.off is None
    assert cached.stats.hits >= SAMPLES * (EPOCHS - 1) - 4 * BATCH
    assert cached.validation_stats.hits >= 12 * (EPOCHS - 1) - BATCH


def test_vision_transformer_under_a_linear_layer(compare, written_at_once):
    check(compare, Probed)


def test_frozen_tower_beside_one_that_trains(compare, written_at_once):
    check(compare, Paired)


def test_frozen_table_of_embeddings(compare, written_at_once):
    check(compare, Embedded)


def test_output_of_the_last_validation_batch_that_is_read_in_training(compare, written_at_once):
    """The frozen module has dropout in training mode, and is called in evaluation mode."""

    class Keeps(Trains):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = TextEncoder().requires_grad_(False), nn.Linear(WIDTH, CLASSES)

        def loss_of(self, batch):
            self.last = self.encoder(batch["ids"], batch["mask"])
            return F.cross_entropy(self.head(self.last[:, 0]), batch["label"])

    def program(run):
        def read(trainer, module):
            if trainer.current_epoch:
                run.note(module.last)

        val = loader(Described(12, seed=2), shuffle=False)
        run.fit(Keeps(), loader(Described()), on(on_train_epoch_start=read), val=val, schedule={}, max_epochs=EPOCHS)

    (cached,) = compare(program, freezes=False, served=None).caches
    assert cached.validation_stats.hits
