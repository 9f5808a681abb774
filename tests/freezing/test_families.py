"""Networks of every kind: the callback attaches without an argument about them, freezes, and training goes on."""

import collections
import math

import lightning as L
import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader

from lightning_egeria import KnowledgeGuidedFreezing
from lightning_egeria.freezing.policy import Decision


class OneMoreEachTime:
    """Freezes one more layer module on every second evaluation; remembers the plasticity that it was given."""

    wants_reference = True

    def start(self, max_depth):
        self.max_depth, self.depth, self.seen = max_depth, 0, []

    def observe(self, step, plasticity, learning_rate, loss):
        if plasticity is None:
            return None
        self.seen.append((self.depth, tuple(plasticity)))
        if len(self.seen) % 2 or self.depth == min(3, self.max_depth):
            return None
        self.depth += 1
        return Decision(self.depth, "one more")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Module(L.LightningModule):
    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Watch(L.Callback):
    """Which parameters moved in the steps after the last freeze."""

    def __init__(self, callback):
        self.callback, self.before = callback, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.callback.events and trainer.global_step == self.callback.events[-1].step:
            self.before = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        self.frozen = {name for name, p in pl_module.named_parameters() if not p.requires_grad}

    def moved(self, module):
        return {name for name, p in module.named_parameters() if not torch.equal(p, self.before[name])}


def check(net, loss, batches, precision="float32"):
    policy = OneMoreEachTime()
    callback = KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=1, workers=0, reference_precision=precision)
    watch, module = Watch(callback), Module(net, loss)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[callback, watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches * 5, batch_size=None))
    policy = callback._engine.policy
    assert callback.frozen_depth >= 2
    assert trainer.global_step > callback.events[-1].step + 1
    assert all(map(math.isfinite, module.losses))
    for depth, plasticity in policy.seen:
        assert all(math.isnan(value) for value in plasticity[:depth])
        assert all(value >= 0 for value in plasticity[depth:])
    moved = watch.moved(module)
    assert moved
    assert watch.frozen
    assert not moved & watch.frozen
    assert all(parameter.requires_grad for parameter in module.parameters())
    return callback


def image_loss(net, batch):
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def images(size, batch=4):
    return [(torch.randn(batch, 3, size, size), torch.randint(4, (batch,))) for _ in range(3)]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "size", "arguments"),
    [
        ("test_resnet", 64, {}),
        ("test_vit", 160, {}),
        slow("resnet18", 64, {}),
        slow("convnext_atto", 64, {}),
        slow("efficientnet_b0", 64, {}),
        slow("mobilenetv2_050", 64, {}),
        slow("mobilenetv3_small_050", 64, {}),
        slow("densenet121", 64, {}),
        slow("regnetx_002", 64, {}),
        slow("repvgg_a0", 64, {}),
        slow("dla46_c", 64, {}),
        slow("hrnet_w18_small", 64, {}),
        slow("inception_v3", 96, {}),
        slow("vit_tiny_patch16_224", 64, {"img_size": 64}),
        slow("deit_tiny_distilled_patch16_224", 64, {"img_size": 64}),
        slow("swin_tiny_patch4_window7_224", 224, {}),
        slow("coat_lite_tiny", 64, {"img_size": 64}),
        slow("levit_128s", 224, {}),
        slow("mobilevit_xxs", 64, {}),
        slow("maxvit_rmlp_pico_rw_256", 256, {}),
        slow("mixer_s32_224", 64, {"img_size": 64}),
        slow("resmlp_12_224", 64, {"img_size": 64}),
        slow("poolformer_s12", 64, {}),
        slow("eva02_tiny_patch14_224", 56, {"img_size": 56}),
    ],
)
@pytest.mark.filterwarnings("ignore:freezing.*share.*and freeze together")  # CoaT does
def test_timm(name, size, arguments):
    check(timm.create_model(name, num_classes=4, **arguments), image_loss, images(size))


@pytest.mark.slow
def test_segmentation():
    net = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4
    )

    def loss(net, batch):
        return nn.functional.cross_entropy(net(batch[0])["out"], batch[1])

    check(net, loss, [(torch.randn(2, 3, 64, 64), torch.randint(4, (2, 64, 64))) for _ in range(3)])


class Encoder(nn.Module):
    """Built as language models commonly are: embeddings, a list of layers, mappings in and out."""

    def __init__(self, tied):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(12, 16)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(0.1)
        self.layer = nn.ModuleList([EncoderLayer() for _ in range(4)])
        self.decoder = nn.Linear(16, 50)
        if tied:
            self.decoder.weight = self.words.weight

    def forward(self, input_ids, attention_mask=None, return_dict=True):
        hidden = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        hidden = self.dropout(self.norm(hidden))
        mask = (1.0 - attention_mask[:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        for layer in self.layer:
            hidden = layer(hidden, attention_mask=mask)[0]
        return collections.OrderedDict(logits=self.decoder(hidden), last_hidden_state=hidden)


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.output = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, hidden, attention_mask):
        heads = (part(hidden).unflatten(2, (2, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(*heads, attn_mask=attention_mask)
        hidden = self.norm(hidden + mixed.transpose(1, 2).flatten(2))
        return (hidden + self.output(hidden),)


def token_batches():
    batches = []
    for _ in range(3):
        ids = torch.randint(50, (8, 12))
        mask = torch.arange(12) < torch.randint(4, 13, (8, 1))
        batches.append({"input_ids": ids, "attention_mask": mask.long(), "labels": ids})
    return batches


def token_loss(net, batch):
    batch = dict(batch)
    labels = batch.pop("labels")
    return nn.functional.cross_entropy(net(**batch)["logits"].flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("precision", ["float32", "bf16", "int8"])
def test_a_language_encoder(precision):
    callback = check(Encoder(tied=False), token_loss, token_batches(), precision)
    assert callback.layer_modules[-4:] == [f"net.layer.{index}" for index in range(4)]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")  # pytest.warns emits Lightning's again
def test_a_language_encoder_with_tied_embeddings_freezes_nothing_and_says_so():
    policy = OneMoreEachTime()
    callback = KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=1, workers=0)
    module = Module(Encoder(tied=True), token_loss)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False)
    with pytest.warns(UserWarning, match="used both in 'net.words' and behind the last layer module"):
        trainer.fit(module, DataLoader(token_batches() * 3, batch_size=None))
    assert callback.events == []


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_an_encoder_and_decoder_with_padding(precision):
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.source, self.target = nn.Embedding(50, 16), nn.Embedding(50, 16)
            self.transformer = nn.Transformer(16, 2, 3, 3, 32, batch_first=True)
            self.out = nn.Linear(16, 50)

        def forward(self, source, target):
            hidden = self.transformer(
                self.source(source),
                self.target(target),
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1]),
                src_key_padding_mask=source == 0,
                tgt_key_padding_mask=(target == 0).float() * -1e9,
                memory_key_padding_mask=source == 0,
                tgt_is_causal=True,
            )
            return self.out(hidden)

    def loss(net, batch):
        return nn.functional.cross_entropy(net(*batch).flatten(0, 1), batch[1].flatten())

    batches = []
    for _ in range(3):
        source, target = torch.randint(1, 50, (8, 9)), torch.randint(1, 50, (8, 7))
        source[:4, 5:], target[:4, 6:] = 0, 0
        batches.append((source, target))
    callback = check(Translator(), loss, batches, precision)
    assert len(callback.layer_modules) >= 6


def test_a_recurrent_classifier():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(50, 16)
            self.first, self.second = nn.LSTM(16, 16, batch_first=True), nn.LSTM(16, 16, batch_first=True)
            self.out = nn.Linear(16, 4)

        def forward(self, ids):
            return self.out(self.second(self.first(self.words(ids))[0])[0][:, -1])

    batches = [(torch.randint(50, (8, 9)), torch.randint(4, (8,))) for _ in range(3)]
    check(Recurrent(), image_loss, batches)
