"""What ranks under `GraphPipelineStrategy` do in tests, and the same in one process."""

import contextlib
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_egeria import GraphPipelineStrategy, KnowledgeGuidedFreezing
from lightning_egeria.errors import EgeriaError
from support.pipelining.pipeline_runs import same_costs

STAGES = {"image": ["image"], "text": ["text"], "end": ["head"]}
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def examples(samples=24):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 6, generator=generator)
    words = torch.randint(0, 11, (samples, 3), generator=generator)
    return TensorDataset(images, words, torch.randint(0, 3, (samples,), generator=generator))


def loader(shuffle=True):
    return DataLoader(examples(), batch_size=8, shuffle=shuffle)


class TwoTowers(L.LightningModule):
    """A plain LightningModule: nothing in it knows of pipelines."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.shuffle = not dropout  # Lightning does not resume the order of samples
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 8))
        self.text = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(24, 8))
        self.head = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.trained = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)], prefix="trained_")
        self.mean = MeanMetric()
        self.seen = {}

    def forward(self, image, text):
        image = self.image(image)
        self.log("length", image.norm(dim=1).mean(), on_epoch=True)
        return self.head(torch.cat([image, self.text(text)], 1))

    def training_step(self, batch, batch_idx):
        image, text, label = batch
        logits = self(image, text) * self.scale
        if float(logits.detach().abs().max()) > 1e6:  # values may decide behind the last module
            raise ValueError("diverged")
        loss = nn.functional.cross_entropy(logits, label)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("right", (logits.argmax(1) == label).float().mean(), batch_size=len(label))
        self.trained(logits, label)
        self.log_dict(self.trained, on_step=True, on_epoch=True)
        self.mean.update(image)
        return {"loss": loss + 0.01 * self.current_epoch}

    def on_train_epoch_end(self):
        self.log("mean", self.mean.compute(), sync_dist=True)
        self.mean.reset()

    def validation_step(self, batch, batch_idx):
        image, text, label = batch
        logits = self.head(torch.cat([self.image(image), self.text(text)], 1))
        self.accuracy(logits, label)
        self.log("accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, label), sync_dist=True)

    def train_dataloader(self):
        return loader(self.shuffle)

    def val_dataloader(self):
        return loader(False)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Notes(L.Callback):
    """What a user sees: metrics after each epoch, and which weights this process holds while it trains."""

    def __init__(self):
        self.metrics, self.held = [], None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        names = [name for name, p in module.named_parameters() if p.untyped_storage().nbytes() == p.nbytes > 4]
        state = [name for name, p in module.named_parameters() if trainer.optimizers[0].state.get(p)]
        self.held = names, state

    def on_train_epoch_end(self, trainer, module):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(folder, strategy="auto", epochs=2, resume=None, module=None, **arguments):
    module = module or TwoTowers()
    notes = Notes()
    checkpoint = ModelCheckpoint(folder, monitor="val_loss", save_last=True, save_top_k=1)
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        **{"max_epochs": epochs, "strategy": strategy, "accelerator": "cpu", **QUIET, **arguments},
        callbacks=[notes, checkpoint],
        log_every_n_steps=1,
    )
    trainer.fit(module, ckpt_path=resume)
    return module, trainer, notes


@mock.patch("lightning_egeria.methods.pipelining.preparation.measured_graph", same_costs)
def in_stages(folder, plain_folder):
    """Everything that one start of the ranks can show."""
    settings = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    strategy = GraphPipelineStrategy(devices=3, micro_batches=4, stages=STAGES)
    module, trainer, notes = fit(folder / "stages", strategy, **settings)
    found = {"held": notes.held, "metrics": notes.metrics, "state": weights_of(module)}
    found["best"] = trainer.checkpoint_callback.best_model_path
    validated = trainer.validate(module, verbose=False)
    found["validated"] = validated[0]
    # from a checkpoint of the plain run, and of the other plan
    planned = GraphPipelineStrategy(devices=3, micro_batches=4)
    resumed, _, _ = fit(folder / "resumed", planned, 4, plain_folder / "last.ckpt", **settings)
    found["resumed"] = weights_of(resumed)
    for name, stop in (("whole", 3), ("first half", 1)):
        strategy = GraphPipelineStrategy(devices=3, micro_batches=4, stages=STAGES)
        dropping = TwoTowers(dropout=0.5)
        fit(folder / name, strategy, stop, module=dropping)
        found[name] = weights_of(dropping)
    strategy = GraphPipelineStrategy(devices=3, micro_batches=4, stages=STAGES, recompute=True)
    dropping = TwoTowers(dropout=0.5)
    fit(folder / "second half", strategy, 3, folder / "first half" / "last.ckpt", module=dropping)
    found["second half"] = weights_of(dropping)
    found["freezing"] = freeze(folder)
    found["search"] = search(folder)
    return found


def freeze(folder):
    """A tower that freezes runs forward only, in a new plan."""

    class Freezes(TwoTowers):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.text.requires_grad_(False)

    strategy = GraphPipelineStrategy(devices=3, micro_batches=4)
    module, _, _ = fit(folder / "freezes", strategy, 2, module=Freezes())
    plain, _, _ = fit(folder / f"plain freezes {strategy.global_rank}", epochs=2, module=Freezes(), devices=1)
    return weights_of(module), weights_of(plain)


def search(folder):
    """A search for a learning rate trains, and loads the weights from before."""

    class Searches(TwoTowers):
        learning_rate = 0.01

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.learning_rate)

    found = []
    for strategy in (GraphPipelineStrategy(devices=3, micro_batches=4, stages=STAGES), "auto"):
        options = {"accelerator": "cpu", "enable_checkpointing": False, "default_root_dir": folder, **QUIET}
        options |= {"devices": 1} if strategy == "auto" else {}
        L.seed_everything(1, verbose=False)
        finder, module = LearningRateFinder(num_training_steps=5), Searches()
        L.Trainer(strategy=strategy, callbacks=[finder], max_epochs=1, **options).fit(module)
        found.append(weights_of(module))
    return found


def order_of_samples(folder, strategy):
    """Labels of each batch, where something draws random numbers before training."""
    labels = []

    class Records(TwoTowers):
        def on_train_batch_start(self, batch, batch_idx):
            labels.append(batch[2].tolist())

    module = Records()
    L.seed_everything(1, verbose=False)
    torch.rand(3)
    options = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "default_root_dir": folder, **QUIET}
    L.Trainer(strategy=strategy, max_epochs=1, **options).fit(module)
    return labels


def weights_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


class Counts(TwoTowers):
    def training_step(self, batch, batch_idx):
        self.steps = batch_idx
        return super().training_step(batch, batch_idx)


class Computes(TwoTowers):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean", self.mean.compute())
        return loss


class Penalty(TwoTowers):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] + self.image[0].weight.square().sum()


class Returns(TwoTowers):
    def training_step(self, batch, batch_idx):
        return {**super().training_step(batch, batch_idx), "preds": 3}


class Gathers(TwoTowers):
    def training_step(self, batch, batch_idx):
        return self.all_gather(super().training_step(batch, batch_idx)["loss"]).mean()


class Skips(TwoTowers):
    def training_step(self, batch, batch_idx):
        return None if batch_idx else super().training_step(batch, batch_idx)


class LogsAMetric(TwoTowers):
    def training_step(self, batch, batch_idx):
        self.log("accuracy", MulticlassAccuracy(3))
        return super().training_step(batch, batch_idx)


class Manual(TwoTowers):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Twice(TwoTowers):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


SCALED = [MixedPrecision("16-mixed", "cpu")]
REFUSED = {
    "changes an attribute": (Counts, {}, "training_step changes 'steps'"),
    "computes a metric": (Computes, {}, "training_step calls compute() of the metric 'mean'"),
    "logs a metric": (LogsAMetric, {}, "self.log('accuracy') in training_step must get one number or a metric of"),
    "reads weights": (Penalty, {}, "training_step reads the weights of 'image.0' without calling it"),
    "returns more": (Returns, {}, "training_step returns ['loss', 'preds'], expected only the loss"),
    "gathers": (Gathers, {}, "training_step calls all_gather"),
    "skips": (Skips, {}, "in another order than at first, or one is left out"),
    "manual": (Manual, {}, "does not run with manual optimization"),
    "LBFGS": (Twice, {}, "LBFGS computes several losses a step"),
    "other devices": (TwoTowers, {"devices": 2}, "got Trainer(devices=2) and 1 of the strategy"),
    "precision": (TwoTowers, {"precision": "64-true"}, "needs precision='32-true' or 'bf16-mixed'"),
    "scaled gradients": (TwoTowers, {"plugins": SCALED}, "'bf16-mixed', got '16-mixed'. A scaler of gradients"),
}


def refused(kind, arguments, folder, callbacks=()):
    """The message of a run in one process."""
    strategy = GraphPipelineStrategy(devices=1, micro_batches=2)
    options = {"max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": False, "default_root_dir": folder}
    trainer = L.Trainer(strategy=strategy, callbacks=list(callbacks), **options, **QUIET, **arguments)
    with contextlib.suppress(RuntimeError):
        try:
            trainer.fit(kind())
        except EgeriaError as error:
            return str(error)
    return "nothing was raised"


def with_freezing(folder):
    return refused(TwoTowers, {}, folder, [KnowledgeGuidedFreezing()])
