"""What the training step makes of the batch before it calls the network: parts of its rows, arguments for the back."""

import numpy as np
import pytest
import torch
from cached_runs import Classifier, Net, fit, images, loader_of
from test_same_training import assert_same_training, pair
from test_texts import assert_same_training_as_said
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria.caching.arguments import Part
from lightning_egeria.demos.translation import TranslationTransformer, padded

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
ENCODER = 5  # layer modules: the words, their places, two layers; and the target's words


def sentences(count=48, shortest=3, longest=9, more=8):
    """Targets are longer by ``more``: where both are as long by chance, a batch shows nothing."""
    generator = torch.Generator().manual_seed(0)

    def text(more):
        length = int(torch.randint(shortest, longest + 1, (), generator=generator)) + more
        return torch.randint(1, 30, (length,), generator=generator)

    return [(text(0), text(more)) for _ in range(count)]


def pairs_of(length=None):
    """Batches of two texts each; without a length, each is of its own, and padded."""
    texts = sentences() if length is None else sentences(shortest=length, longest=length)
    return DataLoader(texts, batch_size=8, shuffle=True, collate_fn=padded)


class Translator(Classifier):
    """The decoder is given the target without its last word."""

    def __init__(self):
        super().__init__(TranslationTransformer(30, 30, width=16, layers=2, heads=2, dropout=0.1, longest=20))

    def training_step(self, batch, batch_idx):
        source, target = batch
        logits = self.net(source, self.given(target))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
        self.losses.append(loss.detach().clone())
        return loss

    def given(self, target):
        return target[:, :-1]


def compare(make, cache_dir, data, schedule, epochs=8):
    plain, cached = pair(make)
    fit(plain, data(), schedule, epochs=epochs)
    wrapped = fit(cached, data(), schedule, {"cache_dir": cache_dir}, epochs=epochs)
    return plain, cached, wrapped


@pytest.mark.parametrize("depth", [ENCODER, ENCODER + 2])
def test_what_is_made_for_layers_behind_the_boundary_is_no_obstacle(tmp_path, depth, caplog):
    """The decoder is given another tensor than the loader gave, so the encoder is what is cached."""
    with caplog.at_level("INFO", "lightning.pytorch"):
        plain, cached, wrapped = compare(Translator, tmp_path, lambda: pairs_of(9), {8: depth})
    assert f"froze {depth} of 8 layer modules" in caplog.text
    assert "cache: the outputs of 'net.encoder_norm' will take" in caplog.text
    assert wrapped.stats.cut == ENCODER - 1
    assert wrapped.stats.hits > 150
    assert_same_training_as_said(plain, cached, caplog.text)


def test_what_is_made_of_padded_batches(tmp_path):
    plain, cached, wrapped = compare(Translator, tmp_path, pairs_of, {8: ENCODER})
    assert wrapped.stats.cut == ENCODER - 1
    assert wrapped.stats.hits > 100
    # Few lengths are in an examined batch of eight, and another length may round otherwise.
    torch.testing.assert_close(torch.stack(plain.losses), torch.stack(cached.losses), rtol=1e-4, atol=1e-5)


class Predictor(Classifier):
    """Says the next word of a text, which comes as one tensor."""

    def __init__(self, part=lambda step, words: words[:, :-1]):
        super().__init__(CausalNet())
        self.part = part

    def training_step(self, batch, batch_idx):
        words = batch[1]
        logits = self.net(self.part(self.global_step, words))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, -logits.shape[1] :].flatten())
        self.losses.append(loss.detach().clone())
        return loss


class CausalNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 30)

    def forward(self, words):
        x, length = self.embedding(words), words.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=later)
        return self.head(x)


def test_the_network_is_given_a_part_of_each_row(tmp_path, caplog):
    with caplog.at_level("INFO", "lightning.pytorch"):
        plain, cached, wrapped = compare(Predictor, tmp_path, lambda: pairs_of(9), {8: 2, 20: 3})
    assert wrapped.stats.cut == 3
    assert wrapped.stats.hits > 150
    assert wrapped.stats.advanced > 20
    assert wrapped.stats.not_loaded == 0  # what comes next is in it
    assert_same_training_as_said(plain, cached, caplog.text)


def another_part(step, words):
    return words[:, :-1] if step < 26 else words[:, 1:]


def a_copy_of_another_part(step, words):
    return another_part(step, words).clone() if step >= 26 else another_part(step, words)


@pytest.mark.parametrize("part", [another_part, a_copy_of_another_part])
def test_another_part_of_each_row_ends_the_cache(tmp_path, part):
    with pytest.warns(UserWarning, match="off: the network was not given what the data loader gave"):
        plain, cached, wrapped = compare(lambda: Predictor(part), tmp_path, lambda: pairs_of(9), {8: 2})
    assert wrapped.stats.hits > 40
    assert_same_training(plain, cached)


def test_rows_of_other_samples_keep_the_cache_off(tmp_path):
    with pytest.warns(UserWarning, match="off: what the training step makes of a sample for the network is not"):
        plain, cached, wrapped = compare(
            lambda: Predictor(lambda _, words: words.roll(1, 0)[:, :-1]), tmp_path, lambda: pairs_of(9), {8: 2}
        )
    assert wrapped.stats.hits == 0
    assert_same_training(plain, cached)


class Weighed(Net):
    """One more argument, a weight for each sample, in front or behind the boundary."""

    def __init__(self, front=False):
        super().__init__()
        self.front = front

    def forward(self, x, weights):
        x = self.stem(x)
        if self.front:
            x = torch.stack([row * weight for row, weight in zip(x, weights.tolist(), strict=True)])
        x = self.c(self.b(self.a(x))).mean((2, 3))
        return self.head(x if self.front else x * weights[:, None])


class WithWeights(Classifier):
    def __init__(self, weights, front=False):
        super().__init__(Weighed(front))
        self.weights = weights

    def training_step(self, batch, batch_idx):
        x, y, *more = batch
        loss = nn.functional.cross_entropy(self.net(x, self.weights(self.global_step, x, *more)), y)
        self.losses.append(loss.detach().clone())
        return loss


def by_list(step, x):
    return torch.tensor([abs(row[0][0][0]) for row in x.tolist()])


def by_numpy(step, x):
    return torch.from_numpy(abs(x.numpy()[:, 0, 0, 0]).copy())


def by_array(step, x):
    return torch.from_numpy(np.abs(np.asarray(x)[:, 0, 0, 0]).copy())


@pytest.mark.parametrize("weights", [by_list, by_numpy, by_array])
def test_an_input_that_is_read_without_an_operation_is_loaded(tmp_path, weights):
    plain, cached, wrapped = compare(lambda: WithWeights(weights), tmp_path, lambda: loader_of(images()), {8: 2, 20: 3})
    assert wrapped.stats.hits > 100
    assert wrapped.stats.not_loaded == 0
    assert_same_training(plain, cached)


def test_what_the_front_reads_without_an_operation_moves_the_boundary(tmp_path):
    """That they are not the same each time shows when samples come again."""

    def weights(step, x):
        return 1 + torch.arange(len(x)) * (step % 3 + 1) / 10

    plain, cached, wrapped = compare(
        lambda: WithWeights(weights, front=True), tmp_path, lambda: loader_of(images()), {8: 2}, epochs=11
    )
    assert wrapped.stats.cut == 1  # which is in front of it
    assert wrapped.stats.hits > 100
    assert_same_training(plain, cached)


def test_a_part_for_the_back_may_change(tmp_path):
    def weights(step, x, more):
        return (more[:, :-1] if step < 26 else more[:, 1:]).mean(1)

    class Parts(WithWeights):
        def training_step(self, batch, batch_idx):
            x, more, y = batch
            return super().training_step((x, y, more), batch_idx)

    x, y = images().tensors
    more = torch.rand(40, 6, generator=torch.Generator().manual_seed(0))
    plain, cached, wrapped = compare(
        lambda: Parts(weights), tmp_path, lambda: loader_of(TensorDataset(x, more, y)), {8: 2}
    )
    assert wrapped.stats.not_loaded > 100
    assert wrapped.stats.off is None
    assert_same_training(plain, cached)


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(30, 16), nn.Linear(16, 16)
        self.lstm, self.head = nn.LSTM(16, 16), nn.Linear(16, 4)

    def forward(self, words):
        return self.head(self.lstm(self.middle(self.embedding(words)).relu())[0][-1])


class Transposed(Classifier):
    def __init__(self):
        super().__init__(TimeFirst())

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0].t(), batch[1]), batch_idx)


class FirstOnly(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0][:1].expand_as(batch[0]), batch[1]), batch_idx)


@pytest.mark.parametrize("make", [Transposed, FirstOnly])
def test_a_view_whose_rows_are_of_other_samples_keeps_the_cache_off(tmp_path, make):
    def data():
        if make is FirstOnly:
            return loader_of(images())
        generator = torch.Generator().manual_seed(0)  # as many words as there are texts in a batch
        words, labels = (
            torch.randint(1, most, size, generator=generator) for most, size in ((30, (40, 8)), (4, (40,)))
        )
        return loader_of(TensorDataset(words, labels))

    with pytest.warns(UserWarning, match="off: what the training step makes of a sample for the network is not"):
        plain, cached, wrapped = compare(make, tmp_path, data, {8: 1})
    assert wrapped.stats.hits == 0
    assert_same_training(plain, cached)


def test_a_part_is_of_each_row_alone():
    words = torch.arange(40).reshape(4, 10)
    assert Part.of(words, words[:, :-1]) == Part((10,), 0, (9,), (10, 1))
    assert Part.of(words[:2], words[:2, :-1]) == Part.of(words, words[:, :-1])
    assert Part.of(words, words[:, 1:]) != Part.of(words, words[:, :-1])
    assert Part.of(words, words[:, 0]) == Part((10,), 0, (), (10,))
    assert Part.of(words, words[:, 2::3]) == Part((10,), 2, (3,), (10, 3))
    pictures = torch.rand(4, 4, 5, 5)
    assert Part.of(pictures, pictures[:, :3]) == Part((4, 5, 5), 0, (3, 5, 5), (100, 25, 5, 1))
    rows = words.flatten()
    for view in (
        rows.as_strided((4, 9), (9, 1)),
        rows.as_strided((4, 9), (0, 1)),
        words[1:, :-1],
    ):
        assert Part.of(words, view) is None
    assert Part.of(words[:3], rows[1:31].reshape(3, 10)) is None  # goes beyond the end of each row
    assert Part.of(words[1:], words[:3, :-1]) is None  # begins in front of it
    assert Part.of(words.T, words.T[:, :-1]) is None
    assert Part.of(words[0].sum(), words[0].sum()) is None
