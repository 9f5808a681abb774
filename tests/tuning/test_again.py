"""A fit behind a fit, a checkpoint of another search, and a fit without one."""

import pytest
from lightning import Trainer

from lightning_egeria import BranchTuner, Choice
from lightning_egeria.errors import CheckpointError
from support.models import Classifier, ConvNet, fit, images, loader

SILENT = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


def test_a_second_fit_of_a_trainer_begins_as_the_first():
    callback = BranchTuner({"gradient_clip_val": Choice([0.001, 5.0])}, first_steps=2, max_share=100)
    trainer = Trainer(max_epochs=1, gradient_clip_val=0.001, callbacks=[callback], enable_model_summary=False, **SILENT)
    settings = []
    for _ in range(2):
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(Classifier(ConvNet()), loader(images(80)))
        assert trainer.gradient_clip_val == 0.001
        settings.append([branch["setting"] for branch in callback.searches[0].branches])
    assert callback.setting == {"gradient_clip_val": 5.0}
    assert settings[0] == settings[1]


def test_a_checkpoint_of_other_tunables_is_refused(tmp_path):
    first = BranchTuner({"momentum": Choice([0.0])}, first_steps=2, max_share=100)
    fit(Classifier(), first, data=loader(images(80))).save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="holds a search for momentum, and this BranchTuner tunes lr"):
        fit(
            Classifier(),
            BranchTuner({"lr": Choice([0.05])}),
            data=loader(images(80)),
            epochs=2,
            ckpt_path=tmp_path / "last.ckpt",
        )


def test_a_fast_dev_run_says_that_it_does_not_search(caplog):
    with caplog.at_level("INFO"):
        fit(Classifier(), BranchTuner({"lr": Choice([0.05])}), data=loader(images(80)), fast_dev_run=True)
    assert caplog.text.count("tuning: no search, because of fast_dev_run") == 1
