"""A run from the cache is the run without it, bit for bit."""

import copy

import lightning as L
import pytest
import torch
from cached_runs import Classifier, Net, Validated, fit, images, loader_of
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_egeria import ScriptedPolicy

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")  # pytest.warns emits Lightning's again

# Freeze, freeze deeper, unfreeze, freeze again; an epoch has five steps.
SCHEDULE = {7: 2, 21: 3, 36: 0, 42: 2}
EPOCHS = 13


def patches_net():
    from timm.models import VisionTransformer

    return VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=4, num_heads=2, num_classes=4)


def resnet():
    from lightning_egeria.demos.resnet import CifarResNet

    return CifarResNet(depth=8, num_classes=4)


class Tokens(Dataset):
    """Texts of one length each; the mask hides the padding."""

    def __init__(self, count=40, length=12):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, 50, (count, length), generator=generator)
        self.lengths = torch.randint(4, length + 1, (count,), generator=generator)
        self.labels = torch.randint(0, 4, (count,), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        mask = torch.arange(self.ids.shape[1]) < self.lengths[index]
        return {"ids": self.ids[index] * mask, "mask": mask, "label": self.labels[index]}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, ids, mask):
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=~mask)
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class TextClassifier(Classifier):
    def __init__(self):
        super().__init__(Encoder())

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch["ids"], batch["mask"]), batch["label"])
        self.losses.append(loss.detach().clone())
        return loss


def pair(make):
    L.seed_everything(0, verbose=False)
    module = make()
    return module, copy.deepcopy(module)


def assert_same_training(first, second):
    assert len(first.losses) == len(second.losses)
    differing = [step for step, (a, b) in enumerate(zip(first.losses, second.losses, strict=True)) if not a.equal(b)]
    assert differing == []
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("make", [Classifier, lambda: Classifier(resnet()), lambda: Classifier(patches_net())])
def test_freeze_deeper_unfreeze_and_freeze_again(tmp_path, make, precision):
    plain, cached = pair(make)
    options = {"epochs": EPOCHS, "trainer_options": {"precision": precision}}
    fit(plain, loader_of(images()), SCHEDULE, **options)
    wrapped = fit(cached, loader_of(images()), SCHEDULE, {"cache_dir": tmp_path / "cache"}, **options)
    assert_same_training(plain, cached)
    assert wrapped.stats.off is None
    assert wrapped.stats.hits > 100
    assert wrapped.stats.advanced > 20
    assert wrapped.stats.not_loaded > 100


class SlowStatistics(Classifier):
    def __init__(self):
        super().__init__()
        for part in self.net.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = 0.01


@pytest.mark.parametrize("schedule", [{7: 2}, {7: 2, 60: 3}, {7: 2, 20: 3, 30: 0, 35: 1}])
def test_the_cache_waits_for_statistics_that_settle(tmp_path, schedule):
    plain, cached = pair(SlowStatistics)
    fit(plain, loader_of(images()), schedule, epochs=24)
    wrapped = fit(cached, loader_of(images()), schedule, {"cache_dir": tmp_path / "cache"}, epochs=24)
    assert_same_training(plain, cached)
    last, depth = list(schedule.items())[-1]
    assert wrapped.stats.off is None
    assert wrapped.stats.cut == depth
    assert wrapped.stats.hits > (120 - last - 40 - 10) * 8 / 2
    assert (wrapped.stats.advanced > 0) == (60 in schedule)


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_worker_processes(tmp_path, options):
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images(), **options), SCHEDULE, epochs=EPOCHS)
    wrapped = fit(cached, loader_of(images(), **options), SCHEDULE, {"cache_dir": tmp_path / "cache"}, epochs=EPOCHS)
    assert_same_training(plain, cached)
    assert wrapped.stats.not_loaded > 50


def test_a_transformer_encoder_with_a_mask(tmp_path):
    plain, cached = pair(TextClassifier)
    fit(plain, loader_of(Tokens()), SCHEDULE, epochs=EPOCHS)
    wrapped = fit(cached, loader_of(Tokens()), SCHEDULE, {"cache_dir": tmp_path / "cache"}, epochs=EPOCHS)
    assert_same_training(plain, cached)
    assert wrapped.stats.hits > 100
    assert wrapped.stats.not_loaded > 100  # the ids; the mask is kept beside the activation


def test_batches_of_another_size(tmp_path):
    """The last batch of an epoch is smaller."""
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images(43)), {5: 2}, epochs=8)
    wrapped = fit(cached, loader_of(images(43)), {5: 2}, {"cache_dir": tmp_path / "cache"}, epochs=8)
    assert_same_training(plain, cached)
    assert wrapped.stats.hits > 100


def test_a_cache_with_room_for_half_the_samples(tmp_path):
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images()), {5: 2}, epochs=10)
    cache = {"cache_dir": tmp_path / "cache", "max_bytes": 60_000, "host_bytes": 0}
    with pytest.warns(UserWarning, match=r"no more outputs .* are written: max_bytes=60000 is reached. \d+ of 40"):
        wrapped = fit(cached, loader_of(images()), {5: 2}, cache, epochs=10)
    assert_same_training(plain, cached)
    assert 0 < wrapped.stats.written < 40
    assert wrapped.stats.hits > 50
    assert wrapped.stats.misses > 50


def test_evaluations_get_the_real_input(tmp_path):
    """The same decisions come of the same plasticity, with an input that was loaded for them."""
    plain, cached = pair(Classifier)
    policies = []
    for module, cache in ((plain, None), (cached, {"cache_dir": tmp_path / "cache"})):
        policies.append(Compared({5: 2}))
        wrapped = fit(module, loader_of(images()), policies[-1], cache, epochs=8, evaluate_every_n_steps=3)
    assert_same_training(plain, cached)
    assert wrapped.stats.not_loaded > 50
    assert Compared.seen[id(policies[0])] == Compared.seen[id(policies[1])]
    assert len(Compared.seen[id(policies[0])]) >= 10


class Compared(ScriptedPolicy):
    """Asks for comparisons, and keeps what it is told."""

    seen = {}  # noqa: RUF012 - the callback works on a copy of the policy
    wants_reference, holds_reference = True, False

    def __init__(self, schedule):
        super().__init__(schedule)
        self.number = id(self)
        self.seen[self.number] = []

    def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
        if plasticity is not None:
            self.seen[self.number].append((step, [value for value in plasticity if value == value]))
        return super().observe(step, plasticity, learning_rate, loss, layer_shares)


def test_an_epoch_that_ends_early_and_accumulation(tmp_path):
    plain, cached = pair(Classifier)
    options = {"epochs": 10, "trainer_options": {"limit_train_batches": 4, "accumulate_grad_batches": 2}}
    fit(plain, loader_of(images(), num_workers=2), {3: 2, 11: 3}, **options)
    wrapped = fit(
        cached, loader_of(images(), num_workers=2), {3: 2, 11: 3}, {"cache_dir": tmp_path / "cache"}, **options
    )
    assert_same_training(plain, cached)
    assert wrapped.stats.hits > 20


def test_validation_never_sees_the_cache(tmp_path):
    plain, cached = pair(Validated)
    val = DataLoader(images(16, seed=1), batch_size=8)
    values = []
    for module, cache in ((plain, None), (cached, {"cache_dir": tmp_path / "cache"})):
        data = L.LightningDataModule()
        data.train_dataloader = lambda: loader_of(images())
        data.val_dataloader = lambda: val
        recorder = Validations()
        fit(module, data, SCHEDULE, cache, epochs=EPOCHS, callbacks=[recorder])
        values.append(recorder.values)
    assert_same_training(plain, cached)
    assert values[0] == values[1]
    assert len(values[0]) == EPOCHS


class Validations(L.Callback):
    def __init__(self):
        self.values = []

    def on_validation_epoch_end(self, trainer, pl_module):
        self.values.append(float(trainer.callback_metrics["val/loss"]))


def test_a_second_run_finds_what_the_first_has_cached(tmp_path):
    """Both freeze the same weights from the start."""
    plain, first = pair(Classifier)
    second = copy.deepcopy(first)
    fit(plain, loader_of(images()), {1: 2}, epochs=4)
    fit(first, loader_of(images()), {1: 2}, {"cache_dir": tmp_path / "cache"}, epochs=4)
    wrapped = fit(second, loader_of(images()), {1: 2}, {"cache_dir": tmp_path / "cache"}, epochs=4)
    assert_same_training(plain, second)
    assert wrapped.stats.written == 0
    assert wrapped.stats.hits >= 120


def test_tensors_of_another_layout(tmp_path):
    plain, cached = pair(ChannelsLast)
    fit(plain, loader_of(images()), SCHEDULE, epochs=EPOCHS)
    wrapped = fit(cached, loader_of(images()), SCHEDULE, {"cache_dir": tmp_path / "cache"}, epochs=EPOCHS)
    assert_same_training(plain, cached)
    assert wrapped.stats.hits > 100


class ChannelsLast(Classifier):
    def __init__(self):
        super().__init__(Net().to(memory_format=torch.channels_last))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x.to(memory_format=torch.channels_last), y), batch_idx)


def test_the_order_of_fields_and_other_collate_functions(tmp_path):
    class Fields(Dataset):
        def __init__(self):
            self.data = images()

        def __len__(self):
            return 40

        def __getitem__(self, index):
            x, y = self.data[index]
            return {"name": f"sample {index}", "label": int(y), "image": x.numpy(), "weight": 1.0 + index}

    def collate(samples):
        return (
            torch.stack([torch.from_numpy(s["image"].copy()) for s in samples]),
            torch.tensor([s["label"] for s in samples]),
            [s["name"] for s in samples],
        )

    class Named(Classifier):
        def training_step(self, batch, batch_idx):
            self.names.append(batch[2])
            return super().training_step(batch[:2], batch_idx)

    plain, cached = pair(Named)
    plain.names, cached.names = [], []
    fit(plain, DataLoader(Fields(), 8, shuffle=True, collate_fn=collate), SCHEDULE, epochs=EPOCHS)
    loader = DataLoader(Fields(), 8, shuffle=True, collate_fn=collate)
    wrapped = fit(cached, loader, SCHEDULE, {"cache_dir": tmp_path / "cache"}, epochs=EPOCHS)
    assert_same_training(plain, cached)
    assert plain.names == cached.names
    assert wrapped.stats.not_loaded > 100


def test_nothing_frozen_changes_nothing(tmp_path):
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images(), num_workers=2), {})
    wrapped = fit(cached, loader_of(images(), num_workers=2), {}, {"cache_dir": tmp_path / "cache"})
    assert_same_training(plain, cached)
    assert wrapped.stats.off == "nothing is frozen"


class TakesRange(Net):
    def forward(self, x, places):
        return super().forward(x) + len(places)


class GivesRange(Classifier):
    def __init__(self):
        super().__init__(TakesRange())

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x, range(4)), y)
        self.losses.append(loss.detach().clone())
        return loss


def test_an_argument_that_cannot_be_made_anew_from_its_parts(tmp_path):
    plain, cached = pair(GivesRange)
    fit(plain, loader_of(images()), SCHEDULE, epochs=EPOCHS)
    wrapped = fit(cached, loader_of(images()), SCHEDULE, {"cache_dir": tmp_path / "cache"}, epochs=EPOCHS)
    assert_same_training(plain, cached)
    assert wrapped.stats.hits > 100


# Of the compiler itself, where it goes on behind a call that it does not compile.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_network(tmp_path):
    """With this backend, compiled code gives the bits of eager code, which runs where the step is examined."""
    plain, cached = pair(Classifier)
    for module in (plain, cached):
        module.net.compile(backend="aot_eager")
    fit(plain, loader_of(images()), SCHEDULE, epochs=EPOCHS)
    wrapped = fit(cached, loader_of(images()), SCHEDULE, {"cache_dir": tmp_path / "cache"}, epochs=EPOCHS)
    assert_same_training(plain, cached)
    assert wrapped.stats.off is None
    assert wrapped.stats.hits > 100


def test_a_network_compiled_as_one_graph_is_left_alone(tmp_path):
    plain, cached = pair(Classifier)
    for module in (plain, cached):
        module.net.compile(backend="aot_eager", fullgraph=True)
    fit(plain, loader_of(images()), {5: 2}, epochs=5)
    with pytest.warns(UserWarning, match="cache of the frozen layers is off: the network is compiled in one piece"):
        wrapped = fit(cached, loader_of(images()), {5: 2}, {"cache_dir": tmp_path / "cache"}, epochs=5)
    assert_same_training(plain, cached)
    assert wrapped.stats.hits == 0
