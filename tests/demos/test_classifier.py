from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria.demos.classifier import ImageClassifier


@pytest.fixture
def loader():
    return DataLoader(TensorDataset(torch.randn(24, 1, 4, 4), torch.arange(24) % 3), batch_size=4)


@pytest.fixture
def trainer(tmp_path):
    return L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def classifier(**arguments):
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    return ImageClassifier(net, 3, partial(SGD, lr=0.1), **arguments)


def test_logs_losses_and_accuracies(trainer, loader):
    model = classifier()
    trainer.fit(model, loader, loader)
    fitted = dict(trainer.callback_metrics)
    tested = trainer.test(model, loader, verbose=False)[0]

    assert set(fitted) == {"train/loss", "val/loss", "val/acc"}
    with torch.no_grad():
        correct = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    assert float(fitted["val/acc"]) == pytest.approx(correct / 24)
    assert tested["test/acc"] == pytest.approx(correct / 24)


@pytest.mark.parametrize(
    ("scheduler", "arguments", "steps", "last_lr"),
    [
        (partial(CosineAnnealingLR), {"scheduler_length_name": "T_max"}, 12, 0.0),
        (partial(OneCycleLR, max_lr=0.1), {"scheduler_length_name": "total_steps"}, 12, None),
        (partial(CosineAnnealingLR), {"scheduler_length_name": "T_max", "scheduler_interval": "epoch"}, 2, 0.0),
        (partial(MultiStepLR, milestones=[1]), {"scheduler_interval": "epoch"}, 2, 0.01),
    ],
)
def test_the_scheduler_is_given_the_length_of_the_training(trainer, loader, scheduler, arguments, steps, last_lr):
    trainer.fit(classifier(scheduler=scheduler, **arguments), loader, loader)

    built = trainer.lr_scheduler_configs[0].scheduler
    assert getattr(built, arguments.get("scheduler_length_name", "last_epoch")) == steps
    assert built.last_epoch == steps
    if last_lr is not None:
        assert built.get_last_lr() == [pytest.approx(last_lr)]
