"""What the ranks of a job train, and how a test watches them."""

import hashlib
import itertools

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, ScriptedPolicy
from support.agreement import checked
from support.models import ConvNet
from support.ranks import EXCHANGE_TIMEOUT

STEPS = 60


class Net(ConvNet):
    """Nothing random, so that a plain loop can do the same."""

    def __init__(self):
        super().__init__((4, 6, 8), dropout=0)


LAYERS = ("stem", "middle", "deep")


def data(samples=64):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(3, (samples,), generator=generator))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def train_dataloader(self):
        return DataLoader(data(), batch_size=4, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-2)


def digest(module):
    state = hashlib.sha256()
    for parameter in module.parameters():
        state.update(parameter.detach().numpy().tobytes())
    return state.hexdigest()


class Watch(L.Callback):
    """Keeps, per optimizer step, a digest of all parameters and the bytes of gradients that were exchanged."""

    def __init__(self):
        self.digests, self.bytes = [], []
        self._sent = 0

    def on_train_start(self, trainer, pl_module):
        def hook(state, bucket):
            self._sent += bucket.buffer().nbytes
            return default_hooks.allreduce_hook(state, bucket)

        trainer.strategy.model.register_comm_hook(dist.group.WORLD, hook)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.digests.append(digest(pl_module))
        self.bytes.append(self._sent)
        self._sent = 0


def fit(module, *callbacks, ranks=2, nodes=1, steps=STEPS, strategy=None, ckpt_path=None, **arguments):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks // nodes,
        num_nodes=nodes,
        strategy=strategy or DDPStrategy(timeout=EXCHANGE_TIMEOUT),
        max_steps=steps,
        callbacks=list(callbacks),
        **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        | arguments,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def scripted(schedule, **arguments):
    return checked(KnowledgeGuidedFreezing(ScriptedPolicy(schedule), **{"evaluate_every_n_steps": 1} | arguments))


def active_bytes(net, depth):
    parts = [part for name, part in net.named_children() if name not in LAYERS[:depth]]
    return sum(p.numel() * p.element_size() for part in parts for p in part.parameters())


def batches_by_hand():
    """This rank's share of the data, epoch after epoch, as the Trainer hands it out."""
    samples = data()
    sampler = DistributedSampler(samples, shuffle=True, seed=0)
    loader = DataLoader(samples, batch_size=4, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def train_by_hand(net, optimizer, batches):
    """A plain loop over these batches."""
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()


def freeze_front(net):
    for part in (net.stem, net.middle):
        part.requires_grad_(False).eval()
        for parameter in part.parameters():
            parameter.grad = None


class Deciding(FreezingPolicy):
    """One that decides soon."""

    def __init__(self):
        super().__init__(patience=1, pretrained=True, trial=False, peer_tolerance=0.9)
