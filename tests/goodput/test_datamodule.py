"""Adaptive batch sizes in whole runs: idle, resumed, with other numbers of batches, with what they are refused."""

import itertools
import json
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_egeria import (
    AdaptiveBatchSize,
    FrozenPrefixCache,
    KnowledgeGuidedFreezing,
    ScriptedPolicy,
    StructuredPartialBackprop,
)
from lightning_egeria.cluster.hints import Hints
from lightning_egeria.errors import ArgumentError, CheckpointError, TrainingDataError, UnsupportedError
from support.goodput import SavesAfter, Seeing, adaptive, numbered, own_generator, trained
from support.models import Classifier, ConvNet, equal, fit, images, loader, trainer_of


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {"limit_train_batches": 4}, {"max_steps": 7}])
def test_at_the_initial_batch_size_nothing_changes(optimizer, options):
    plain, _ = trained(numbered(83, shuffle=True), module=Seeing(optimizer), **options)
    data = adaptive(numbered(83, shuffle=True), 8 * options.get("accumulate_grad_batches", 1))
    watched, trainer = trained(data, module=Seeing(optimizer), **options)
    assert watched.seen == plain.seen
    assert watched.losses == plain.losses
    assert equal(watched, plain)
    assert data.changes == []
    assert data.control.progress.iterations == trainer.global_step
    assert data.control.noise.known


def test_each_sample_comes_once_whatever_the_sizes():
    data = adaptive(batch_sizes={3: 16, 7: 64, 9: 40}, data=numbered(shuffle=True))
    module, trainer = trained(data, epochs=4)
    assert module.sizes == [8, 8, 8, 16, 16, 16, 8, 64, 16, 40, 40, 40, 40]
    assert trainer.global_step == 13
    seen = flat(module.seen)
    assert all(sorted(seen[start : start + 80]) == list(range(80)) for start in range(0, 320, 80))
    assert [(change.step, change.batch_size) for change in data.changes] == [(3, 16), (7, 64), (9, 40)]
    assert trainer.accumulate_grad_batches == 1


def test_memory_ends_at_a_batch_and_accumulation_begins():
    data = adaptive(batch_sizes={2: 32}, local_batch_sizes=(4, 16))
    module, trainer = trained(data, epochs=2)
    assert module.sizes == [8, 8, 16, 16, 16, 16, 16, 16, 16, 16, 16]
    assert [(change.local, change.batches) for change in data.changes] == [(16, 2)]
    assert trainer.global_step == 2 + 2 + 3  # a step at the end of an epoch may have one batch
    assert trainer.accumulate_grad_batches == 1


def test_an_accumulated_step_is_that_of_its_samples():
    """With a linear network and one mean over each batch, two batches of 16 are one of 32."""
    runs = []
    for sizes in ((4, 16), (4, 32)):
        module = Seeing(lr=0.01)
        module.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
        data = adaptive(numbered(96), batch_sizes={4: 32}, local_batch_sizes=sizes, learning_rate="none")
        runs.append(trained(data, module=module)[0])
    first, second = (run.net[1].weight for run in runs)
    assert torch.allclose(first, second, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [2, 4, 6, 9, 11])
def test_resumed_in_an_epoch_it_goes_on(batches, workers, tmp_path):
    if workers and batches != 4:
        pytest.skip("once is enough: workers take time to start")

    def data():
        options = own_generator() | {"num_workers": workers}
        return adaptive(numbered(**options), batch_sizes={3: 16, 8: 32}, learning_rate="none")

    first = data()
    whole, trainer = trained(first, SavesAfter(tmp_path / "one", batches), epochs=3)
    second = data()
    resumed, again = trained(second, epochs=3, ckpt_path=tmp_path / "one")
    assert resumed.seen == whole.seen[batches:]
    assert resumed.losses == whole.losses[batches:]
    assert equal(resumed, whole)
    assert again.global_step == trainer.global_step
    assert second.changes == first.changes
    assert second.control.progress == first.control.progress
    assert second.control.noise.state() == first.control.noise.state()


def test_a_resumed_run_may_reach_its_end_of_epoch(tmp_path):
    """A checkpoint of the last batch of an epoch, as validation at its end writes it."""
    whole, _ = trained(adaptive(numbered(40, **own_generator())), SavesAfter(tmp_path / "one", 5))
    resumed, _ = trained(adaptive(numbered(40, **own_generator())), ckpt_path=tmp_path / "one")
    assert resumed.seen == whole.seen[5:]


def test_a_run_that_resumed_there_resumes_again(tmp_path):
    """Lightning leaves the epoch behind such a checkpoint out of its counters."""
    whole, _ = trained(adaptive(numbered(40, **own_generator())), SavesAfter(tmp_path / "one", 5), epochs=4)
    data = adaptive(numbered(40, **own_generator()))
    trained(data, SavesAfter(tmp_path / "two", 7), epochs=4, ckpt_path=tmp_path / "one")
    resumed, _ = trained(adaptive(numbered(40, **own_generator())), epochs=4, ckpt_path=tmp_path / "two")
    assert resumed.seen == whole.seen[12:]


def test_a_sampler_that_does_not_repeat_begins_again(tmp_path):
    class Counting(torch.utils.data.Sampler):
        begun = 0

        def __len__(self):
            return 24

        def __iter__(self):
            Counting.begun += 1
            return iter(range(Counting.begun, 24 + Counting.begun))

    def data():
        return adaptive(numbered(sampler=Counting()), 8)

    trained(data(), SavesAfter(tmp_path / "one", 2), epochs=1)
    with pytest.warns(UserWarning, match="the order of Counting cannot be repeated"):
        resumed, _ = trained(data(), epochs=1, ckpt_path=tmp_path / "one")
    assert len(flat(resumed.seen[:3])) in (8, 24)


class Scheduled(Seeing):
    def __init__(self, interval="step"):
        super().__init__()
        self.interval = interval

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.steps = self.trainer.estimated_stepping_batches if self.interval == "step" else 2
        falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=self.steps)
        self.scheduler = falls
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": self.interval}}


@pytest.mark.parametrize("count", ["epoch", "step", "progress"])
def test_schedules_keep_their_meaning(count):
    data = adaptive(batch_sizes={4: 32}, schedule_by=count, learning_rate="none")
    module, trainer = trained(data, module=Scheduled())
    assert module.steps == 20
    counted = module.scheduler.last_epoch
    if count == "epoch":
        assert counted == 20  # at its end with the epochs it was made for
        assert module.rates[4:] == pytest.approx([1 - step / 20 for step in (4, 8, 10, 14, 18)])
    elif count == "step":
        assert counted == trainer.global_step == 4 + 2 + 3
    else:
        assert counted == int(data.control.progress.iterations)


def test_schedules_by_epoch_count_epochs():
    module, _ = trained(adaptive(batch_sizes={2: 32}, learning_rate="none"), module=Scheduled("epoch"))
    assert module.scheduler.last_epoch == 2
    assert set(module.rates) == {1.0, 0.5}


def test_with_a_limit_on_steps_schedules_count_steps():
    module, _ = trained(adaptive(batch_sizes={2: 32}), module=Scheduled(), max_steps=6)
    assert module.scheduler.last_epoch == 6


@pytest.mark.parametrize(("rule", "power"), [("sqrt", 0.5), ("linear", 1.0), ("none", 0.0)])
def test_the_learning_rate_of_a_step_follows(rule, power):
    module, trainer = trained(adaptive(batch_sizes={3: 32}, learning_rate=rule))
    assert module.sizes == [8, 8, 8, 32, 24, 32, 32, 16]  # the last step of an epoch is short
    assert module.rates == pytest.approx([0.05 * (size / 8) ** power for size in module.sizes])
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05


class Validating(Seeing):
    at = ()

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.at = (*self.at, len(self.seen))


def test_validation_stays_at_its_share_of_an_epoch():
    data = AdaptiveBatchSize(numbered(), 32, batch_sizes={2: 32}, val_dataloaders=numbered(8))
    module, _ = trained(data, module=Validating(), val_check_interval=0.5)
    assert module.sizes == [8, 8, 32, 32, 32, 32, 16]
    assert module.at == (2, 4, 5, 6, 7)
    whole = AdaptiveBatchSize(numbered(), 32, batch_sizes={2: 32}, val_dataloaders=numbered(8))
    module, _ = trained(whole, module=Validating())
    assert module.at == (4, 7)
    # An epoch with fewer batches than the interval validates at its end.
    counted = AdaptiveBatchSize(numbered(), 32, batch_sizes={4: 32}, val_dataloaders=numbered(8))
    module, _ = trained(counted, module=Validating(), val_check_interval=4)
    assert module.sizes == [8, 8, 8, 8, 32, 16, 32, 32, 16]
    assert module.at == (4, 9)


def test_larger_batches_than_an_epoch_has_samples_are_not_tried():
    data = adaptive(numbered(40), 10**9, batch_sizes={2: 10**9})
    module, _ = trained(data, epochs=3)
    assert module.sizes == [8, 8, 24, 40, 40]
    assert data.control.limits(1).largest == 40


def test_dropping_the_last_batch_drops_no_more_than_at_first():
    data = adaptive(numbered(83, drop_last=True), batch_sizes={3: 32})
    module, _ = trained(data, epochs=3)
    assert module.sizes == [8, 8, 8, 32, 27, 32, 32, 19, 32, 32, 19]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_saving_changes_nothing_and_half_a_pair_goes_on(optimizer, tmp_path):
    def data():
        # The last sizes follow from the noise, and so do the learning rates.
        return adaptive(numbered(**own_generator()), batch_sizes={14: 32}, learning_rate="adascale")

    saving = [SavesAfter(tmp_path / str(batches), batches) for batches in range(1, 17)]
    first, second = data(), data()
    whole, _ = trained(first, module=Seeing(optimizer), epochs=3)
    saved, _ = trained(second, *saving, module=Seeing(optimizer), epochs=3)
    assert equal(saved, whole)
    assert second.control.noise.state() == first.control.noise.state()
    assert whole.sizes[-3:] == [32, 32, 16]
    for batches in (9, 16):  # within and between pairs; Adam's moments count from step 5 on
        third = data()
        resumed, _ = trained(third, module=Seeing(optimizer), epochs=3, ckpt_path=tmp_path / str(batches))
        assert equal(resumed, whole)
        assert third.control.noise.state() == first.control.noise.state()


@pytest.mark.parametrize("batches", [2, 5, 7])
def test_a_run_goes_on_without_it_and_with_it(batches, tmp_path):
    own = own_generator()
    trained(adaptive(numbered(40, **own), 8), SavesAfter(tmp_path / "adaptive", batches))
    trained(numbered(40, **own), SavesAfter(tmp_path / "plain", batches))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*your dataloader is not resumable")  # Lightning's, which goes on as it does
        module, trainer = trained(numbered(40, **own_generator()), epochs=3, ckpt_path=tmp_path / "adaptive")
    assert trainer.global_step == 15
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        data = adaptive(numbered(40, **own_generator()), batch_sizes={9: 16})
        module, _ = trained(data, epochs=3, ckpt_path=tmp_path / "plain")
    begun_again = any("The epoch begins again" in str(one.message) for one in told)
    assert begun_again == (batches != 5)
    seen = flat(module.seen)
    assert len(seen) == 40 * (3 - batches // 6 - (batches == 5))
    assert all(sorted(seen[start : start + 40]) == list(range(40)) for start in range(0, len(seen), 40))


def test_a_resumed_run_keeps_to_new_limits(tmp_path):
    first = adaptive(batch_sizes={2: 32})
    trained(first, SavesAfter(tmp_path / "one", 4))
    for arguments, sizes, steps in (
        ({"largest": 16}, [8] * 10, 5),
        ({"local_batch_sizes": (4, 16)}, [16] * 5, 3),
        ({"largest": 64}, [32, 32, 16], 3),
    ):
        data = adaptive(**arguments, batch_sizes={})
        module, trainer = trained(data, epochs=2, ckpt_path=tmp_path / "one")
        assert (module.sizes, trainer.global_step - 4) == (sizes, steps)
        assert data.control.initial == 8


def test_what_did_not_fit_is_remembered_by_a_resumed_run(tmp_path):
    class Small(Seeing):
        def training_step(self, batch, batch_idx):
            if len(batch[2]) > 16:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(batch, batch_idx)

    trained(adaptive(batch_sizes={2: 32}), SavesAfter(tmp_path / "one", 3), module=Small())
    data = adaptive(batch_sizes={2: 32})
    module, _ = trained(data, module=Small(), ckpt_path=tmp_path / "one")
    assert data.control.out_of_memory == 32
    assert max(module.sizes) == 16
    assert data.changes[-1].batches == 2


def test_loaders_that_are_reloaded_and_batches_that_are_bucketed():
    data = adaptive(batch_sizes={4: 32})
    module, _ = trained(data, reload_dataloaders_every_n_epochs=1, epochs=3)
    assert module.sizes == [8] * 4 + [32, 16] + [32, 32, 16] * 2

    class Buckets:
        batch_size = 8

        def __len__(self):
            return 10

        def __iter__(self):
            return iter(torch.arange(80).view(10, 8).flip(0).tolist())

    module, _ = trained(adaptive(numbered(batch_size=1, batch_sampler=Buckets()), batch_sizes={4: 16}))
    assert module.sizes == [8] * 4 + [16] * 3 + [16] * 5
    assert sorted(flat(module.seen)) == sorted([*range(80)] * 2)


class OutOfMemory(Seeing):
    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 20:
            raise torch.OutOfMemoryError("out of memory")
        return super().training_step(batch, batch_idx)


def test_memory_that_does_not_suffice_is_remembered(tmp_path):
    data = adaptive(batch_sizes={2: 32})
    module, _ = trained(data, SavesAfter(tmp_path / "one", 3), module=OutOfMemory())
    assert data.control.out_of_memory == 32
    assert module.sizes == [8, 8, 8, 8, 16, 16, 16] + [16] * 5
    assert [(change.batch_size, change.batches) for change in data.changes] == [(32, 2)]
    again = adaptive(batch_sizes={2: 32})
    trained(again, module=OutOfMemory(), ckpt_path=tmp_path / "one")
    assert again.control.out_of_memory == 32


def test_memory_that_ends_all_the_same_says_what_to_do():
    class Later(Seeing):
        def training_step(self, batch, batch_idx):
            if self.global_step == 5:
                raise torch.OutOfMemoryError("out of memory")
            return super().training_step(batch, batch_idx)

    data = adaptive()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trained(data, module=Later())
    assert caught.value.__notes__ == [
        "goodput: batches had 8 samples in each process. Set the second value of local_batch_sizes to a smaller number"
    ]


def test_freezing_restarts_the_noise_and_the_cache_goes_on(tmp_path):
    losses = []
    for cached in (False, True):
        freezing = KnowledgeGuidedFreezing(
            ScriptedPolicy({6: 1}), evaluate_every_n_steps=1, background=False, deterministic=True
        )
        inner = AdaptiveBatchSize(loader(images(80)), 32, batch_sizes={55: 32}, learning_rate="none")
        data = FrozenPrefixCache(inner, cache_dir=tmp_path, min_free_bytes=0) if cached else inner
        torch.manual_seed(0)
        module = Classifier(ConvNet(dropout=0))
        fit(module, freezing, data=data, epochs=9)
        losses.append(module.losses)
        assert inner.control.depth == 1
        assert {where.depth for where in inner.control.profile.measured(1)} == {1}
        assert inner.control.noise.estimates < 34  # those since the freeze
        assert [change.batch_size for change in inner.changes] == [32]
    assert data.stats.hits + data.stats.misses > 0
    assert losses[0] == losses[1]


def test_hints_are_there_for_a_scheduler(tmp_path):
    data = adaptive(hints=tmp_path / "new" / "hints.json")
    trained(data)
    hints = Hints.read(tmp_path / "new" / "hints.json")
    assert (hints.limits.initial, hints.limits.largest, hints.profiled) == (8, 64, 1)
    assert hints.progress == 20.0
    assert hints.goodput().efficiency(torch.tensor([8.0]).double().numpy()) == [1.0]
    assert hints.unfrozen is None
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.warns(UserWarning, match="cannot write hints to"):
        trained(adaptive(hints=taken / "hints.json"), epochs=1)


def test_the_state_is_of_plain_types(tmp_path):
    trained(adaptive(batch_sizes={2: 16}), SavesAfter(tmp_path / "one", 4))
    read = torch.load(tmp_path / "one", weights_only=True)["AdaptiveBatchSize"]["goodput"]
    meter = read.pop("meter")
    assert json.loads(json.dumps(read)) == read
    assert meter == {"divided": False, "pair": None, "kept": []}
    read["version"] = 0
    data = adaptive()
    data.trainer = trainer_of()
    data.trainer.strategy._lightning_module = Seeing()
    data.setup("fit")
    with pytest.raises(CheckpointError, match="goodput state of version 0, expected version 2"):
        data.load_state_dict({"datamodule": {}, "goodput": read})
    data.on_exception(ValueError())
    whole = torch.load(tmp_path / "one", weights_only=True)
    del whole["AdaptiveBatchSize"]["goodput"]["noise"]
    torch.save(whole, tmp_path / "damaged")
    with pytest.raises(CheckpointError, match="the goodput state in the checkpoint is damaged"):
        trained(adaptive(), ckpt_path=tmp_path / "damaged")


def test_wrong_arguments_are_refused():
    for wrong in (0.1, type("Class", (), {"factors": print})):
        with pytest.raises(ArgumentError, match="learning_rate must be 'auto', one of"):
            adaptive(learning_rate=wrong)
    with pytest.raises(ArgumentError, match="hints must be the path of a file, got ''"):
        adaptive(hints="")
    with pytest.raises(ArgumentError, match=r"8 samples, expected a size within local_batch_sizes, \(1, 4\)"):
        trained(adaptive(local_batch_sizes=(1, 4)))
    with pytest.raises(ArgumentError, match="at least 8, the initial one; got 2: 7"):
        trained(adaptive(batch_sizes={2: 7}))
    for name in ("max_batch_size", "change_every_n_steps", "measure_every_n_steps"):
        with pytest.raises(ArgumentError, match=f"{name} must be an integer of at least 1, got 0"):
            AdaptiveBatchSize(loader(), **{"max_batch_size": 8, name: 0})
    with pytest.raises(ArgumentError, match="schedule_by must be one of epoch, step, progress, or None, got 'batch'"):
        adaptive(schedule_by="batch")
    for sizes in ((0, 4), (8, 4), 8, (8,), ("8", None)):
        with pytest.raises(ArgumentError, match="local_batch_sizes must be the smallest and the largest"):
            adaptive(local_batch_sizes=sizes)
    with pytest.raises(ArgumentError, match="learning_rate must be"):
        adaptive(learning_rate="cubic")
    with pytest.raises(ArgumentError, match="max_batch_size must be at least 8, the initial batch size"):
        trained(adaptive(largest=4))


class Manual(Classifier):
    automatic_optimization = False


class Lbfgs(Seeing):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Sam(Seeing):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class FromIterator(Seeing):
    def training_step(self, dataloader_iter):
        raise AssertionError


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("module", "callbacks", "options", "message"),
    [
        (Manual, [], {}, "Use automatic optimization"),
        (FromIterator, [], {}, "AdaptiveBatchSize does not run with dataloader_iter: it counts the samples"),
        (Lbfgs, [], {}, "LBFGS runs the training step more than once"),
        (Sam, [], {}, "ran the training step more than once in step 0"),
        (Seeing, [], {"overfit_batches": 2}, "overfit_batches replaces the sampler"),
        (Seeing, [GradientAccumulationScheduler({0: 2})], {}, "both set accumulate_grad_batches"),
        (Seeing, [StructuredPartialBackprop()], {}, "goodput and partial cannot train in one run"),
    ],
)
def test_what_is_not_supported_is_refused(module, callbacks, options, message):
    with pytest.raises(UnsupportedError, match=message):
        trained(adaptive(), *callbacks, module=module(), **options)


def test_data_without_batches_to_change_are_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.randn(4, 3))

    for data in ([numbered()], torch.utils.data.DataLoader(Stream())):
        with pytest.raises(TrainingDataError, match="needs one torch DataLoader"):
            trained(adaptive(data))
    freezing = KnowledgeGuidedFreezing(ScriptedPolicy({}), background=False)
    with pytest.raises(TrainingDataError, match=r"FrozenPrefixCache\(AdaptiveBatchSize"):
        trained(AdaptiveBatchSize(FrozenPrefixCache(numbered()), 8), freezing)


def test_a_fast_run_is_the_users():
    data = adaptive(batch_sizes={1: 32})
    module, _ = trained(data, fast_dev_run=3)
    assert module.sizes == [8, 8, 8]
    assert data.total_batch_size is None


def test_it_finds_a_larger_batch_by_itself(monkeypatch):
    """With times as if each batch took the same, noisy gradients get the largest batch."""
    from lightning_egeria.methods.goodput.profile import Profile

    add = Profile.add
    monkeypatch.setattr(Profile, "add", lambda self, where, _, *rest, **more: add(self, where, 1.0, *rest, **more))
    data = adaptive(numbered(400), change_every_n_steps=12)
    module, trainer = trained(data, epochs=4, module=Seeing(lr=0.0))
    assert data.changes
    assert data.changes[0].step == 12
    assert data.changes[-1].batch_size > 32
    assert "goodput" in data.changes[0].reason
    assert data.total_batch_size is None
    seen = flat(module.seen)
    assert all(sorted(seen[start : start + 400]) == list(range(400)) for start in range(0, 1600, 400))
    assert data.control.progress.iterations > trainer.global_step


def test_a_plain_trainer_can_validate():
    class Validating(Seeing):
        def validation_step(self, batch, batch_idx):
            pass

    data = AdaptiveBatchSize(numbered(), 32, val_dataloaders=numbered(8))
    trainer_of().validate(Validating(), data)
    assert data.changes == []
