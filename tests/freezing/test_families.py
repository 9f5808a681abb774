"""Networks of every kind: the callback attaches without an argument about them, freezes, and training goes on."""

import collections
import copy
import dataclasses
import math

import lightning as L
import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader

from lightning_egeria import KnowledgeGuidedFreezing
from lightning_egeria.core.training.freezer import Decision
from support.models import slow, trainer_of


def freezing(policy, **arguments):
    return KnowledgeGuidedFreezing(policy, **{"background": False, "evaluate_every_n_steps": 1, **arguments})


class OneMoreEachTime:
    """Freezes one more layer module on every second evaluation; remembers the plasticity that it was given."""

    wants_reference, holds_reference = True, False

    def start(self, max_depth):
        self.max_depth, self.depth, self.seen = max_depth, 0, []

    def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
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
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Watch(L.Callback):
    """What the callback, which stands before it, has frozen after each step, and what moves from the last freeze on."""

    def __init__(self, callback):
        self.callback = callback
        self.frozen, self.resting = {}, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.global_step
        self.frozen[step] = {name for name, p in pl_module.named_parameters() if not p.requires_grad}
        self.resting[step] = {path for path, part in pl_module.named_modules() if not part.training}
        learns = {name for name, p in pl_module.named_parameters() if p.grad is not None and p.grad.any()}
        buffers = {  # of what is at rest
            f"{path}.{name}"
            for path in self.resting[step]
            for name, _ in pl_module.get_submodule(path).named_buffers(recurse=False)
        }
        state = {**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())}
        if self.callback.events and self.callback.events[-1].step == step:
            self.before = {name: value.detach().clone() for name, value in state.items()}
            self.learning, self.still = set(state), self.frozen[step] | (buffers & set(state))
        if self.callback.events:
            self.learning &= learns
            self.moved = {name for name, value in state.items() if not torch.equal(value, self.before[name])}


class ByHand(L.Callback):
    """Freezes what another run had frozen after the same steps."""

    def __init__(self, watched):
        self.watched = watched

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not trainer.global_step:
            return
        for name in self.watched.frozen[trainer.global_step]:
            pl_module.get_parameter(name).requires_grad_(False).grad = None
        for path in self.watched.resting[trainer.global_step]:
            pl_module.get_submodule(path).training = False
        for part in pl_module.modules():
            slow = isinstance(part, nn.BatchNorm2d) and part.momentum < 0.1
            if slow and part.training and not part.weight.requires_grad:
                part.momentum = 0.1  # its statistics settle, in more steps than there are here


def fit(net, loss, batches, *callbacks):
    module = Module(net, loss)
    trainer = trainer_of(*callbacks, epochs=1)
    L.seed_everything(3, verbose=False)
    trainer.fit(module, DataLoader(batches * 4, batch_size=None))
    return module


def check(net, loss, batches, precision="float32"):
    by_hand = copy.deepcopy(net)
    callback = freezing(OneMoreEachTime(), reference_precision=precision)
    watch = Watch(callback)
    module = fit(net, loss, batches, callback, watch)
    assert callback.frozen_depth >= 2
    assert callback.events[-1].step < len(module.losses) - 1
    assert all(map(math.isfinite, module.losses))
    seen = callback.active_policy.seen
    for depth, plasticity in seen:
        assert all(math.isnan(value) for value in plasticity[:depth])
        assert all(value >= 0 for value in plasticity[depth:])
    # Without dropout, a reference is its model until the next step.
    assert sum(max(plasticity[depth:]) > 0 for depth, plasticity in seen) > len(seen) / 2
    assert watch.still
    assert watch.learning
    assert not watch.moved & watch.still
    assert watch.moved >= watch.learning
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert all(part.training and not {"forward", "train"} & set(vars(part)) for part in module.modules())
    again = fit(by_hand, loss, batches, ByHand(watch))
    assert again.losses == module.losses
    assert all(map(torch.equal, again.state_dict().values(), module.state_dict().values()))
    return callback


def image_loss(net, batch):
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def images(size, batch=4):
    return [(torch.randn(batch, 3, size, size), torch.randint(4, (batch,))) for _ in range(3)]


@pytest.mark.parametrize(
    ("name", "size", "arguments"),
    [
        ("test_resnet", 64, {}),
        ("test_vit", 160, {}),
        slow("test_convnext", 64, {}),
        ("test_efficientnet", 64, {}),
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
        slow("swin_tiny_patch4_window7_224", 64, {"img_size": 64}),
        slow("coat_lite_tiny", 64, {"img_size": 64}),
        slow("levit_128s", 224, {}),
        slow("efficientformer_l1", 224, {}),
        slow("ghostnet_050", 64, {}),
        slow("gmlp_s16_224", 64, {"img_size": 64}),
        slow("xcit_nano_12_p16_224", 64, {"img_size": 64}),
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
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
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

    def __init__(self, tied=False, kind=collections.OrderedDict):
        super().__init__()
        self.kind = kind
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
        return self.kind(last_hidden_state=hidden, logits=self.decoder(hidden))


@dataclasses.dataclass
class Output:
    last_hidden_state: torch.Tensor
    logits: torch.Tensor

    def __getitem__(self, name):
        return getattr(self, name)


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


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        ("float32", collections.OrderedDict),
        ("int8", Output),
        slow("float32", Output),
        slow("bf16", collections.OrderedDict),
        slow("bf16", Output),
        slow("int8", collections.OrderedDict),
    ],
)
def test_a_language_encoder(precision, kind):
    callback = check(Encoder(kind=kind), token_loss, token_batches(), precision)
    assert callback.layer_modules[-4:] == [f"net.layer.{index}" for index in range(4)]


def test_tied_embeddings_freeze_nothing_and_a_warning_says_so():
    callback = freezing(OneMoreEachTime())
    with pytest.warns(UserWarning, match="is used in 'net.words' and again behind the last layer module"):
        fit(Encoder(tied=True), token_loss, token_batches(), callback)
    assert callback.events == []


@pytest.mark.parametrize("precision", ["float32", slow("bf16"), "int8"])
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
