"""Models of Hugging Face's transformers, small and with random weights; texts are padded to the longest of a batch."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from support.caching.harness import ran
from support.caching.parts import BATCH, CLASSES, SAMPLES, Classifier, images, loader

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers': make test-slow installs it")
pytestmark = pytest.mark.slow

DEPTH, WORDS = 3, 60
SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = SIZES | TOKENS | {"num_key_value_heads": 1, "use_cache": False}
GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# Configuration and class of each, and its arguments.
ENCODERS = {
    "Bert": SIZES | PLAIN | TOKENS,
    "Roberta": SIZES | PLAIN | TOKENS,
    "Electra": SIZES | PLAIN | TOKENS | {"embedding_size": 8},
    "DistilBert": TOKENS
    | {"dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 32}
    | {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "GPT2": TOKENS | GPT2 | {"use_cache": False},
    "Llama": DECODER,
    "Qwen2": DECODER,
}
IMAGES = {
    "ViT": SIZES | PLAIN | {"image_size": 16, "patch_size": 4},
    "Beit": SIZES | PLAIN | {"image_size": 16, "patch_size": 4, "drop_path_rate": 0.0},
    "Dinov2": SIZES | {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.0},
    "Swin": PLAIN
    | {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [2, 2],
        "num_heads": [2, 2],
        "window_size": 4,
        "drop_path_rate": 0.0,
    },
    "ConvNext": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "patch_size": 2},
}


def config_of(name, options):
    return getattr(transformers, f"{name}Config")(num_labels=CLASSES, **options)


class Texts(Classifier):
    """The model computes the loss itself."""

    def training_step(self, batch, batch_idx):
        loss = self.net(**batch).loss
        self.losses.append(loss.item())
        return loss


def text(index):
    length = 3 + index % 11
    return {"input_ids": (torch.arange(length) * (index + 1)) % (WORDS - 5) + 3, "labels": index % CLASSES}


def padded(samples):
    tokens = pad_sequence([one["input_ids"] for one in samples], batch_first=True)
    labels = torch.tensor([one["labels"] for one in samples])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def translated(samples):
    batch = padded(samples)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100).flip(1)}


def losses_of(tmp_path, make, collate):
    """Losses without and with the cache, and the cache."""
    losses, caches = {}, []

    def program(run):
        module = Texts(make())
        module.losses = losses.setdefault(run.cached, [])
        run.fit(
            module, loader([text(at) for at in range(SAMPLES)], collate_fn=collate), schedule={2: DEPTH}, max_epochs=8
        )

    for cached in (False, True):
        caches = ran(program, cached, tmp_path / str(cached)).caches
    return losses[False], losses[True], caches[0]


@pytest.mark.parametrize(("name", "options"), ENCODERS.items(), ids=ENCODERS)
def test_texts_of_a_model_come_from_entries(tmp_path, name, options):
    make = getattr(transformers, f"{name}ForSequenceClassification")
    plain, cached, cache = losses_of(tmp_path, lambda: make(config_of(name, options)), padded)
    assert cache.stats.off is None
    assert cache.stats.wrong == 0
    assert cache.stats.hits >= SAMPLES * 8 - BATCH * (2 * SAMPLES // BATCH + 1), cache.stats
    assert cached == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_translation_with_frozen_embeddings(tmp_path, name):
    """The embeddings are also the head, so nothing freezes while they train."""
    options = {
        "T5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2, "dropout_rate": 0.0},
        "Bart": {"d_model": 16, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0},
    }[name]
    options |= TOKENS | {"decoder_start_token_id": 2, "use_cache": False}

    def make():
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config_of(name, options))
        model.get_input_embeddings().requires_grad_(False)
        return model

    plain, cached, cache = losses_of(tmp_path, make, translated)
    assert cache.stats.off is None
    assert cache.stats.hits >= 4 * SAMPLES, cache.stats
    assert cached == pytest.approx(plain, rel=1e-4)


def test_keys_and_values_that_layers_collect_are_named(tmp_path):
    model = transformers.GPT2ForSequenceClassification
    plain, cached, cache = losses_of(tmp_path, lambda: model(config_of("GPT2", TOKENS | GPT2)), padded)
    assert "is given a DynamicCache, which may change" in cache.stats.off
    assert cached == plain


@pytest.mark.parametrize(("name", "options"), IMAGES.items(), ids=IMAGES)
def test_images_of_a_model_come_from_entries(compare, name, options):
    class Logits(Classifier):
        def loss_of(self, x, y):
            return torch.nn.functional.cross_entropy(self.net(x).logits, y)

    def program(run):
        net = getattr(transformers, f"{name}ForImageClassification")(config_of(name, options))
        run.fit(Logits(net), loader(images(channels=3, size=16)), schedule={2: DEPTH}, max_epochs=4)

    compare(program)
