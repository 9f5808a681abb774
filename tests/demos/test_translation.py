import gzip
from functools import partial

import pytest
import torch

from lightning_egeria import KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.demos.translation import BEGIN, END, PAD, TranslationData, TranslationTransformer, Translator
from lightning_egeria.errors import ArgumentError, TrainingDataError
from support.demos import trainer_for

PAIRS = [("A man.", "Ein Mann."), ("A dog and a man.", "Ein Hund und ein Mann."), ("A dog.", "Ein Hund.")] * 8


@pytest.fixture
def root(tmp_path):
    for split in ("train", "val"):
        for place, language in enumerate(("en", "de")):
            text = "".join(pair[place] + "\n" for pair in PAIRS)
            if language == "en":
                (tmp_path / f"{split}.en").write_text(text)
            else:
                (tmp_path / f"{split}.de.gz").write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_pairs_come_as_numbers_padded_to_the_longest(root):
    data = TranslationData(str(root), batch_size=3)
    data.setup("fit")
    source, target = next(iter(data.val_dataloader()))
    english, german = data.vocabularies
    assert [english.decode(row) for row in source.tolist()] == ["a man .", "a dog and a man .", "a dog ."]
    assert [german.decode(row) for row in target.tolist()] == ["ein mann .", "ein hund und ein mann .", "ein hund ."]
    assert (source[:, 0] == BEGIN).all()
    assert source[0].tolist()[-3:] == [PAD] * 3
    assert source[1, -1] == END
    assert len(data.train_dataloader()) == 8


def test_part_of_the_pairs(root):
    data = TranslationData(str(root), batch_size=2, train_size=2)
    data.setup("fit")
    assert len(data.train_set) == 2
    for size in (1, 25):
        with pytest.raises(ArgumentError, match="train_size must lie between"):
            TranslationData(str(root), batch_size=2, train_size=size).setup("fit")


def test_what_is_missing_is_named(root):
    (root / "val.de.gz").write_bytes(gzip.compress(b"Ein Mann.\n"))
    with pytest.raises(TrainingDataError, match=r"val\.en has 24 lines, but val\.de has 1"):
        TranslationData(str(root), batch_size=2).setup("fit")
    (root / "train.en").unlink()
    with pytest.raises(TrainingDataError, match=r"neither train\.en nor train\.en\.gz"):
        TranslationData(str(root), batch_size=2).setup("fit")


def test_a_word_sees_only_earlier_words_and_no_padding():
    torch.manual_seed(0)
    net = TranslationTransformer(20, 20, width=16, layers=2, heads=2).eval()
    source, target = torch.randint(4, 20, (2, 5)), torch.randint(4, 20, (2, 6))
    logits = net(source, target)
    changed = target.clone()
    changed[:, 3] = 4 + (target[:, 3] - 3) % 16
    torch.testing.assert_close(net(source, changed)[:, :3], logits[:, :3])
    assert not torch.allclose(net(source, changed)[:, 3], logits[:, 3])
    longer = torch.cat([source, torch.zeros(2, 3, dtype=torch.long)], 1)
    torch.testing.assert_close(net(longer, target), logits, rtol=1e-4, atol=1e-5)


def fit(root, epochs, *callbacks, words=20):
    torch.manual_seed(0)
    net = TranslationTransformer(20, words, width=32, layers=2, heads=2, dropout=0.0)
    model = Translator(net, partial(torch.optim.AdamW, lr=3e-3), longest=10)
    trainer = trainer_for(epochs, *callbacks)
    trainer.fit(model, datamodule=TranslationData(str(root), batch_size=8))
    return trainer.callback_metrics


def test_a_network_may_say_words_that_the_language_has_not(root):
    metrics = fit(root, 1, words=500)
    assert 0 <= float(metrics["val/bleu"]) < 0.5


def test_learns_three_sentences_by_heart(root):
    metrics = fit(root, 20)
    assert float(metrics["val/loss"]) < 0.5
    assert float(metrics["val/bleu"]) > 0.9


def test_the_encoder_and_then_the_decoder_can_freeze(root):
    freezing = KnowledgeGuidedFreezing(ScriptedPolicy({2: 1}), background=False)
    fit(root, 2, freezing)
    names = freezing.layer_modules
    assert freezing.frozen_depth == 1
    encoder, decoder = (names.index(f"net.{part}.1") for part in ("encoder", "decoder"))
    assert encoder < decoder
