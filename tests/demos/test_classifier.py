from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria.demos.classifier import ImageClassifier, load_weights
from lightning_egeria.demos.resnet import CifarResNet
from lightning_egeria.errors import ArgumentError
from support.models import trainer_of


@pytest.fixture
def loader():
    return DataLoader(TensorDataset(torch.randn(24, 1, 4, 4), torch.arange(24) % 3), batch_size=4)


@pytest.fixture
def trainer(tmp_path):
    return trainer_of(epochs=2, default_root_dir=tmp_path)


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


def test_begins_with_weights_from_a_file_but_for_the_head(tmp_path):
    given = CifarResNet(8, num_classes=7)
    save_file(given.state_dict(), tmp_path / "weights.safetensors")
    net = CifarResNet(8, num_classes=3)
    head = net.linear.weight.clone()
    ImageClassifier(net, 3, partial(SGD, lr=0.1), weights=str(tmp_path / "weights.safetensors"))

    assert torch.equal(net.linear.weight, head)
    state = given.state_dict()
    assert all(torch.equal(v, state[name]) for name, v in net.state_dict().items() if not name.startswith("linear."))


def test_weights_of_before_batches_were_counted(tmp_path):
    given = {n: v for n, v in CifarResNet(8).state_dict().items() if not n.endswith("num_batches_tracked")}
    save_file(given, tmp_path / "weights.safetensors")
    net = CifarResNet(8)
    load_weights(net, str(tmp_path / "weights.safetensors"))
    assert torch.equal(net.conv1.weight, given["conv1.weight"])


@pytest.mark.parametrize("change", ["missing", "more", "shape"])
def test_weights_of_another_network_are_refused(tmp_path, change):
    state = CifarResNet(8).state_dict()
    if change == "missing":
        del state["layer2.0.conv1.weight"]
    elif change == "more":
        state["layer2.7.conv1.weight"] = torch.zeros(1)
    else:
        state["layer2.0.conv1.weight"] = torch.zeros(1)
    save_file(state, tmp_path / "weights.safetensors")
    net = CifarResNet(8)
    before = net.conv1.weight.clone()
    with pytest.raises(ArgumentError, match=r"another network; tensors that differ: 'layer2\.\d\.conv1\.weight'$"):
        load_weights(net, str(tmp_path / "weights.safetensors"))
    assert torch.equal(net.conv1.weight, before)


def test_weights_that_are_not_there_are_named():
    with pytest.raises(ArgumentError, match=r"model\.weights=nowhere"):
        classifier(weights="nowhere")
