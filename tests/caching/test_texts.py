"""Samples of different length, padded batch by batch."""

import lightning as L
import pytest
import torch
from cached_runs import Classifier, fit
from test_same_training import assert_same_training, pair
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, ScriptedPolicy

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")


class Texts(Dataset):
    """Token numbers; as tensors or as lists."""

    def __init__(self, count=48, kind="tensor", longest=12):
        generator = torch.Generator().manual_seed(0)
        self.kind = kind
        lengths = torch.randint(3, longest + 1, (count,), generator=generator).tolist()
        self.texts = [torch.randint(1, 50, (length,), generator=generator) for length in lengths]
        self.labels = torch.randint(0, 4, (count,), generator=generator)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        return {"ids": text if self.kind == "tensor" else text.tolist(), "label": self.labels[index]}


def padded(samples):
    texts = [torch.as_tensor(sample["ids"]) for sample in samples]
    ids = pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return {"ids": ids, "mask": mask, "label": torch.stack([sample["label"] for sample in samples])}


def masked_by_value(samples):
    batch = padded(samples)
    return {**batch, "mask": batch["ids"] != 0}


class Encoder(nn.Module):
    def __init__(self, per_position=False):
        super().__init__()
        self.per_position = per_position
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1) for _ in range(4)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, ids, mask):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=~mask)
        if self.per_position:
            return self.head(hidden)
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class TextClassifier(Classifier):
    def __init__(self):
        super().__init__(Encoder())

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch["ids"], batch["mask"]), batch["label"])
        self.losses.append(loss.detach().clone())
        return loss


class Tagger(Classifier):
    """Learns something at each position."""

    def __init__(self, padding_too=False):
        super().__init__(Encoder(per_position=True))
        self.padding_too = padding_too

    def training_step(self, batch, batch_idx):
        wanted = batch["ids"] % 4
        if not self.padding_too:
            wanted = wanted.masked_fill(~batch["mask"], -100)
        loss = nn.functional.cross_entropy(self.net(batch["ids"], batch["mask"]).flatten(0, 1), wanted.flatten())
        self.losses.append(loss.detach().clone())
        return loss


def texts(collate=padded, kind="tensor", **options):
    return DataLoader(Texts(kind=kind), batch_size=8, shuffle=True, collate_fn=collate, **options)


def compare(make, cache_dir, **options):
    plain, cached = pair(make)
    schedule = {8: 2, 26: 3}
    fit(plain, texts(**options), schedule, epochs=10)
    wrapped = fit(cached, texts(**options), schedule, {"cache_dir": cache_dir}, epochs=10)
    return plain, cached, wrapped


def assert_same_training_as_said(plain, cached, told):
    """Bit for bit, unless the cache has found and said that on this processor a sample's bits depend on its batch."""
    if "the last bits depend on where in a batch a sample is" not in told:
        assert_same_training(plain, cached)
        return
    assert len(plain.losses) == len(cached.losses)
    torch.testing.assert_close(torch.stack(plain.losses), torch.stack(cached.losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain.state_dict(), cached.state_dict(), rtol=1e-3, atol=1e-4)


def test_dropout_in_front_is_off_where_a_cache_stands_for_it(tmp_path, caplog):
    seen = {}

    class Look(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            layers = pl_module.net.layers
            seen.setdefault(trainer.global_step, []).append([layers[i].dropout1.training for i in (0, 3)])

    for cache in ({"cache_dir": tmp_path / "cache"}, None):
        freezing = KnowledgeGuidedFreezing(ScriptedPolicy({4: 2, 12: 3}), background=False)
        trainer = L.Trainer(
            max_epochs=4, accelerator="cpu", callbacks=[freezing, Look()], logger=False, enable_checkpointing=False
        )
        with caplog.at_level("INFO"):
            trainer.fit(TextClassifier(), texts() if cache is None else FrozenPrefixCache(texts(), **cache))
        assert caplog.text.count("dropout in frozen layers ('net.layers.0.dropout1', say) is off") == 1
    assert seen[3] == [[True, True], [True, True]]
    assert seen[5] == seen[15] == [[False, True], [True, True]]


@pytest.mark.parametrize("kind", ["tensor", "list"])
@pytest.mark.parametrize("workers", [0, 2])
def test_entries_have_the_length_of_their_sample(tmp_path, kind, workers, caplog):
    plain, cached, wrapped = compare(TextClassifier, tmp_path / "cache", kind=kind, num_workers=workers)
    assert wrapped.stats.off is None
    assert wrapped.stats.hits > 150
    assert wrapped.stats.advanced > 20
    assert wrapped.stats.not_loaded > 150
    assert_same_training_as_said(plain, cached, caplog.text)


def test_a_mask_that_is_made_of_the_tokens(tmp_path, caplog):
    """They have to be loaded, but the frozen layers are left out all the same."""
    plain, cached, wrapped = compare(TextClassifier, tmp_path / "cache", collate=masked_by_value)
    assert wrapped.stats.hits > 150
    assert wrapped.stats.not_loaded == 0
    assert_same_training_as_said(plain, cached, caplog.text)


def test_a_loss_at_each_position(tmp_path, caplog):
    """The labels are made of the tokens, so these are loaded."""
    plain, cached, wrapped = compare(Tagger, tmp_path / "cache")
    assert wrapped.stats.hits > 150
    assert wrapped.stats.not_loaded == 0
    assert_same_training_as_said(plain, cached, caplog.text)


def test_a_loss_that_learns_from_padding_keeps_the_cache_off(tmp_path):
    with pytest.warns(UserWarning, match="the loss depends on positions behind the end of shorter samples"):
        plain, cached, wrapped = compare(lambda: Tagger(padding_too=True), tmp_path / "cache")
    assert wrapped.stats.hits == 0
    assert_same_training(plain, cached)


class Convolutions(nn.Module):
    """Each position sees its neighbours, padding or not."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, ids, mask):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden.transpose(1, 2)).relu().transpose(1, 2)
        return self.head((hidden * mask[..., None]).sum(1))


def test_layers_that_look_at_the_padding_are_not_cached(tmp_path):
    class Neighbours(TextClassifier):
        def __init__(self):
            super().__init__()
            self.net = Convolutions()

    with pytest.warns(UserWarning, match="cache of the frozen layers is off: something behind .* or looks at padding"):
        plain, cached, wrapped = compare(Neighbours, tmp_path / "cache")
    assert wrapped.stats.hits == 0
    assert_same_training(plain, cached)


def test_the_shortest_texts_need_not_run_alone(tmp_path, caplog):
    """Batches are always long enough for the convolution; three words alone are not."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 16, padding_idx=0)
            self.wide, self.layer = nn.Conv1d(16, 16, 5, bias=False), nn.Conv1d(16, 16, 1)
            self.head = nn.Linear(16, 4)

        def forward(self, ids, mask):
            hidden = self.wide(self.embedding(ids).transpose(1, 2)).relu()
            return self.head(self.layer(hidden).relu().amax(2))

    class WideClassifier(TextClassifier):
        def __init__(self):
            super().__init__()
            self.net = Wide()

    plain, cached = pair(WideClassifier)
    fit(plain, texts(), {8: 1}, epochs=8)
    with caplog.at_level("INFO", "lightning.pytorch"):
        wrapped = fit(cached, texts(), {8: 1}, {"cache_dir": tmp_path}, epochs=8)
    assert wrapped.stats.off is None
    assert wrapped.stats.hits > 100
    assert_same_training_as_said(plain, cached, caplog.text)


class Told(TextClassifier):
    """The network is told how long its batch is."""

    def __init__(self):
        super().__init__()
        self.net = ToldEncoder()

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["ids"], batch["mask"], batch["ids"].shape[1])
        loss = nn.functional.cross_entropy(logits, batch["label"])
        self.losses.append(loss.detach().clone())
        return loss


class ToldEncoder(Encoder):
    def forward(self, ids, mask, length):
        return super().forward(ids[:, :length], mask)


def test_an_argument_may_depend_on_the_length_of_the_batch(tmp_path, caplog):
    plain, cached, wrapped = compare(Told, tmp_path / "cache")
    assert wrapped.stats.off is None
    assert wrapped.stats.hits > 150
    assert wrapped.stats.not_loaded > 150
    assert_same_training_as_said(plain, cached, caplog.text)
