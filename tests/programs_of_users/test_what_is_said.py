"""Programs in which the user has to know what the callback does, and why."""

import logging

import pytest
import torch
from torch import nn

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing
from support.user_programs import Blocks, SavesAt, run, same, scripted, vectors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch.lightning_egeria")
    return lambda word: [record.getMessage() for record in caplog.records if word in record.getMessage()]


def test_a_run_that_resumes_says_how_much_is_frozen_again(tmp_path, lines):
    run(Blocks(), scripted({5: 2}), SavesAt(tmp_path, 4, 16))
    assert lines("resumed") == []
    run(Blocks(), scripted({5: 2}), ckpt_path=tmp_path / "4.ckpt")
    assert lines("resumed") == []
    run(Blocks(), scripted({5: 2}), ckpt_path=tmp_path / "16.ckpt")
    assert lines("resumed") == [
        "freezing: resumed at step 16: 2 of 5 layer modules are frozen again, up to 'net.1.0'",
    ]


class Probe(Blocks):
    """A linear probe on a backbone that the user has frozen."""

    def __init__(self):
        super().__init__(4)
        self.net[:4].requires_grad_(False).eval()


def test_a_frozen_backbone_with_one_layer_behind_it():
    plain, alone, cached = Probe(), Probe(), Probe()
    run(plain)
    for module, data in ((alone, None), (cached, FrozenPrefixCache(vectors()))):
        (text,) = run(module, KnowledgeGuidedFreezing(), data=data)
        assert text.startswith(
            "freezing: you have frozen 'net.0.0.weight' and 15 more. FrozenPrefixCache alone serves frozen layers, "
            "without this callback, which has nothing more to freeze: Probe has no layer modules, expected at least 2."
        )
        assert same(plain, module)


class Gan(Blocks):
    """Two networks with an optimizer each; the discriminator trains first."""

    def __init__(self):
        super().__init__(3)
        self.automatic_optimization = False
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters()) for part in (self.net, self.discriminator)]

    def training_step(self, batch, batch_idx):
        of_generator, of_discriminator = self.optimizers()
        made = self.net(batch[0])
        of_discriminator.zero_grad()
        self.manual_backward(self.discriminator(made.detach()).mean() - self.discriminator(batch[0][:, :3]).mean())
        of_discriminator.step()
        of_generator.zero_grad()
        self.manual_backward(-self.discriminator(made).mean())
        of_generator.step()


def test_a_gan_is_asked_which_network_freezes():
    plain, ours, named = Gan(), Gan(), Gan()
    run(plain)
    callback = scripted({6: 1})
    (text,) = run(ours, callback)
    assert "Name the layer modules of one network with layer_modules=[...]" in text
    assert callback.events == []
    assert same(plain, ours)
    callback = scripted({6: 1}, layer_modules=["discriminator.0", "discriminator.2"])
    assert run(named, callback) == []
    assert callback.frozen_depth == 1
