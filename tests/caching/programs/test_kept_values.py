"""Values that a program keeps beyond a step, while the weights they were computed with change."""

import concurrent.futures
import copy
import threading

import pytest
import torch
from torch import nn

from lightning_egeria.errors import CacheError
from support.caching.parts import Chain, Classifier, Samples, Stepping, Validated, grid, loader, on


def _data(mean, new):
    mean.data.mul_(0.5).add_(new.data, alpha=0.5)


def _other_data(mean, new):
    mean.data = 0.5 * mean.data + 0.5 * new.data


def _in_place(mean, new):
    mean.lerp_(new, 0.5)


class MeanTeacher(Classifier):
    """How sure a teacher is weighs the loss of the next steps.

    Args:
        update: changes a weight of the teacher.
        when: in the step, or behind it.
    """

    def __init__(self, update, when):
        super().__init__(Chain())
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.update, self.when, self.weight = update, when, torch.tensor(1.0)

    def loss_of(self, x, y):
        with torch.no_grad():
            sure = self.teacher(x).softmax(-1).amax(-1).mean()
            if self.when == "in the step":
                self.renew()
        loss = nn.functional.cross_entropy(self.net(x), y) * self.weight
        self.weight = 0.9 * self.weight + 0.1 * sure
        self.log("sure", sure, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_):
        if self.when == "behind it":
            self.renew()

    @torch.no_grad()
    def renew(self):
        for mean, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            self.update(mean, new)


@pytest.mark.parametrize(
    ("update", "when"), grid([_data, _other_data, _in_place], ["in the step", "behind it"], every=2)
)
def test_mean_teacher(compare, update, when):
    compare(lambda run: run.fit(MeanTeacher(update, when), max_epochs=5))


class KeepsValidation(Validated):
    """Keeps what a teacher says of validation batches, while the teacher changes."""

    def __init__(self):
        super().__init__(Chain())
        self.teacher, self.kept = copy.deepcopy(self.net).requires_grad_(False), []

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.kept.append(self.teacher(batch[0]).mean())
        self.kept.append(batch[0][0, 0])

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        self.teacher.c[0].weight.lerp_(self.net.c[0].weight, 0.5)


def test_values_of_validation_outlive_the_fit(compare):
    def program(run):
        module = KeepsValidation()
        run.fit(module, val=loader(shuffle=False), max_epochs=5)
        run.note(all(getattr(one, "is_known", True) for one in module.kept))  # nothing of the run is needed any more
        run.note(torch.stack(module.kept))

    compare(program)


def test_another_thread_calls_the_network(compare):
    """With as many samples as a batch has, all through training."""

    def program(run):
        module, probe, ended = Classifier(Chain()), torch.ones(6, 8), threading.Event()
        calls = []

        @torch.no_grad()
        def call():
            while not ended.wait(0.001):
                module.net(probe)

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            try:
                run.fit(module, None, on(on_train_start=lambda *_: calls.append(pool.submit(call))), max_epochs=5)
            finally:
                ended.set()
        calls[0].result()  # raises what the thread has met

    compare(program)


class KeepsInner(Classifier):
    """Keeps the output of a frozen layer for an input that it has made, and changes that input in place."""

    def __init__(self):
        super().__init__(Chain())
        self.kept = []
        self.net.a.register_forward_hook(lambda layer, inputs, output: self.kept.append(output))

    def loss_of(self, x, y):
        self.made = y[:, None] + torch.ones(8)
        return nn.functional.cross_entropy(self.net(self.made), y)

    def on_after_backward(self):
        self.made.zero_()


@pytest.mark.parametrize("most_bytes", [0, 2**22])
def test_made_input_that_changes_behind_its_use(compare, monkeypatch, most_bytes):
    """What frozen layers would have returned is lost if the input was too large to copy; reading it raises an error."""
    monkeypatch.setattr("lightning_egeria.caching.record.meta.MOST_BYTES", most_bytes)

    def program(run):
        module = KeepsInner()
        run.fit(module, max_epochs=5)
        if most_bytes:
            run.note(torch.stack(module.kept))
        elif run.cached:
            with pytest.raises(CacheError, match="changed in place after the frozen layers were called with it"):
                torch.stack(module.kept)

    compare(program)


@pytest.mark.parametrize("layer", ["a", "b", "c"])
def test_hook_that_is_there_for_one_call(compare, layer):
    """The trial of the cache begins while torch goes through the hooks of a layer."""

    def step(module, x, y):
        seen = []
        handle = getattr(module.net, layer).register_forward_hook(lambda *call: seen.append(call[-1].mean()))
        loss = nn.functional.cross_entropy(module.net(x), y)
        handle.remove()
        return loss + seen[0].detach()

    compare(lambda run: run.fit(Stepping(step, Chain()), max_epochs=5))


@pytest.mark.parametrize("change", [lambda x: x.mul_(0.5), lambda x: x[:4].add_(1)])
def test_samples_that_are_part_of_the_dataset_change(compare, change):
    """A collate function that copies nothing: what the step changes comes again in the next epoch."""

    def step(module, x, y):
        for row in x:
            change(row)
        return nn.functional.cross_entropy(module.net(torch.stack(x)), y)

    def program(run):
        data = Samples(lambda data, index: (data.x[index], data.y[index]))
        together = loader(data, collate_fn=lambda rows: ([x for x, _ in rows], torch.stack([y for _, y in rows])))
        run.fit(Stepping(step, Chain()), together, max_epochs=5)
        run.note(data.x)

    compare(program, served=None)


def test_a_hook_on_all_modules_is_the_reason(compare):
    def program(run):
        handle = nn.modules.module.register_module_forward_hook(lambda *call: None)
        try:
            run.fit(Classifier(Chain()), max_epochs=8)
        finally:
            handle.remove()

    assert "is watched by a hook on all modules" in compare(program, served=False).messages[0]
