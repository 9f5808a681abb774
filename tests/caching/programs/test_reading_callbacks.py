"""Callbacks, hooks and loggers that read the batch or the outputs of frozen modules."""

import copy
import io
import queue
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.caching.parts import Classifier, ConvNet, Net, Stepping, at, grid, images, loader, on

# By hook: what a callback does with a batch. `args` are those of the hook.
BATCH_READERS = {
    "start": ("on_train_batch_start", lambda run, batch: run.note(batch[0].mean())),
    "start now and then": (
        "on_train_batch_start",
        lambda run, batch: run.note(batch[0].sum(1)) if run.batches % 5 == 4 else None,
    ),
    "changed at start": (
        "on_train_batch_start",
        lambda run, batch: batch[0].mul_(0.5) if run.batches in (9, 10) else None,
    ),
    "replaced at start": (
        "on_train_batch_start",
        lambda run, batch: batch.__setitem__(0, batch[0] + 1) if run.batches in (9, 10) else None,
    ),
    "labels changed at start": (
        "on_train_batch_start",
        lambda run, batch: batch[1].fill_(0) if run.batches in (9, 10) else None,
    ),
    "end": ("on_train_batch_end", lambda run, batch: run.note(batch[0].numpy().copy())),
    "end now and then": (
        "on_train_batch_end",
        lambda run, batch: run.note(batch[0].norm()) if run.batches % 5 == 4 else None,
    ),
    "changed at end": ("on_train_batch_end", lambda run, batch: batch[0].zero_()),
    "deepcopy": ("on_train_batch_end", lambda run, batch: run.note(copy.deepcopy(batch))),
    "type of the batch": ("on_train_batch_start", lambda run, batch: run.note((str(type(batch)), len(batch)))),
    "batch size": ("on_train_batch_end", lambda run, batch: run.note(sum(len(part) for part in batch))),
    "labels": ("on_train_batch_end", lambda run, batch: run.note(torch.bincount(batch[1]))),
    "printed": ("on_train_batch_end", lambda run, batch: run.note(f"{batch}")),
}


@pytest.mark.parametrize(("reader", "owner"), grid(BATCH_READERS, ["callback", "module"], every=7))
def test_hook_reads_the_batch(compare, reader, owner):
    hook, read = reader

    def program(run):
        def look(*args):
            read(run, args[-2])

        module = Classifier()
        if owner == "module":
            setattr(module, hook, look)
        run.fit(module, None, *([on(**{hook: look})] if owner == "callback" else []))

    compare(program)


STORES = {
    "all": lambda run: True,
    "first of an epoch": lambda run: run.batches % 4 == 0,
    "one": lambda run: run.batches == 9,
}


@pytest.mark.parametrize(("when", "hook"), grid(STORES, ["on_train_batch_start", "on_train_batch_end"]))
def test_batches_are_kept_and_read_later(compare, when, hook):
    """At the end of each epoch, and after training."""

    def program(run):
        kept = []
        keeper = on(
            **{hook: lambda trainer, module, *rest: kept.append(rest[-2]) if when(run) else None},
            on_train_epoch_end=lambda trainer, module: run.note([x.mean() for x, _ in kept[-2:]]),
        )
        run.fit(Classifier(), None, keeper)
        run.note(kept)

    compare(program)


@pytest.mark.parametrize("part", [slice(None), slice(1)], ids=["batch", "input"])
def test_last_batch_is_always_kept(compare, part, caplog):
    """Its samples would be loaded one batch too late, each time."""

    def program(run):
        caplog.clear()
        keeper = on(on_train_batch_end=lambda trainer, module, outputs, batch, index: setattr(run, "kept", batch[part]))
        run.fit(Classifier(), None, keeper, max_epochs=14)
        run.note(run.kept)

    with caplog.at_level("INFO"):
        run = compare(program)
    assert caplog.text.count("something that keeps a batch after its step") == 1
    assert 0 < run.caches[-1].stats.loaded_after_all < 200


def test_batch_is_kept_and_trained_on_again(compare):
    """Experience replay: the step trains on an earlier batch as well."""

    def program(run):
        memory = []

        def step(module, x, y):
            memory.append((x, y))
            loss = F.cross_entropy(module.net(x), y)
            if run.batches % 3 == 2:
                old_x, old_y = memory[len(memory) // 2]
                loss = loss + F.cross_entropy(module.net(old_x), old_y)
            return loss

        run.fit(Stepping(step))

    compare(program)


def test_outputs_of_the_step_carry_the_batch(compare):
    class Returns(Classifier):
        def training_step(self, batch, batch_idx):
            x, y = batch
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, y), "logits": logits.detach(), "input": x}

    compare(lambda run: run.fit(Returns()))


def test_batch_is_saved_to_a_file(compare):
    def program(run):
        def save(trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                torch.save({"batch": batch, "weights": module.state_dict()}, run.folder / "batch.pt")
                run.note(torch.load(run.folder / "batch.pt")["batch"])

        run.fit(Classifier(), None, on(on_train_batch_end=save))

    compare(program)


def test_batch_is_read_by_another_thread_later(compare):
    """A logger with a thread, which is behind by some batches."""

    def program(run):
        waiting, found = queue.Queue(), []

        def work():
            while (x := waiting.get()) is not None:
                found.append(x.mean().item())

        thread = threading.Thread(target=work)
        thread.start()
        try:
            run.fit(Classifier(), None, on(on_train_batch_end=lambda *rest: waiting.put(rest[-2][0])))
        finally:
            waiting.put(None)
            thread.join()
        run.note(found)

    compare(program)


def test_exponential_statistics_of_inputs(compare):
    class Counts(Classifier):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def training_step(self, batch, batch_idx):
            if batch_idx % 2:
                self.mean.lerp_(batch[0].mean(0), 0.1)
            return super().training_step(batch, batch_idx)

    compare(lambda run: run.fit(Counts()))


# Hooks on modules of the network.
MODULES = {
    "network": lambda net: net,
    "first": lambda net: net.a,
    "inside": lambda net: net.a[0],
    "boundary": lambda net: net.b,
    "behind": lambda net: net.c,
    "head": lambda net: net.head,
}


def _hooks(module, read):
    return {
        "forward": lambda: module.register_forward_hook(lambda part, args, out: read(out)),
        "pre": lambda: module.register_forward_pre_hook(lambda part, args: read(args[0])),
        "replaces output": lambda: module.register_forward_hook(lambda part, args, out: out * 1.5),
        "replaces input": lambda: module.register_forward_pre_hook(lambda part, args: (args[0] + 0.5,)),
        "input and output": lambda: module.register_forward_hook(lambda part, args, out: read((args[0], out))),
        "with kwargs": lambda: module.register_forward_hook(
            lambda part, args, kwargs, out: read((args, kwargs, out)), with_kwargs=True
        ),
    }


KINDS = ["forward", "pre", "input and output", "replaces output", "replaces input", "with kwargs"]


@pytest.mark.parametrize(("kind", "where", "begins"), grid(KINDS, list(MODULES), ["before", "step 9"], every=11))
def test_hook_on_a_module(compare, kind, where, begins):
    def program(run):
        def register(trainer, module):
            _hooks(MODULES[where](module.net), run.note)[kind]()

        begin = on(on_fit_start=register) if begins == "before" else at(9, register)
        run.fit(Classifier(), None, begin)

    compare(program, served=None if "replaces" in kind else True)


@pytest.mark.parametrize("where", grid(list(MODULES), every=2))
def test_hook_that_reads_now_and_then(compare, where):
    def program(run):
        module = Classifier()
        MODULES[where](module.net).register_forward_hook(
            lambda part, args, out: run.note((args[0].mean(), out.std())) if run.batches % 4 == 1 else None
        )
        run.fit(module)

    compare(program)


def test_hook_is_removed_in_the_middle(compare):
    def program(run):
        module = Classifier()
        handle = module.net.a.register_forward_hook(lambda part, args, out: run.note(out))
        run.fit(module, None, at(9, lambda *_: handle.remove()))

    compare(program)


def test_global_hooks(compare):
    def program(run):
        def look(part, args, out):
            if isinstance(part, nn.Linear) and run.batches in (4, 10):
                run.note((args[0], out))

        handle = nn.modules.module.register_module_forward_hook(look)
        try:
            run.fit(Classifier())
        finally:
            handle.remove()

    compare(program, served=None)


def test_features_of_a_frozen_layer_are_logged(compare):
    """A hook stores what a layer returned; the step reads it after the loss, in each third batch."""

    def program(run):
        features = {}
        module = Stepping(lambda module, x, y: None)
        module.net.b.register_forward_hook(lambda part, args, out: features.update(b=out, input=args[0]))

        def step(module, x, y):
            loss = F.cross_entropy(module.net(x), y)
            if run.batches % 3 == 2:
                run.note((features["b"].norm(dim=1), features["input"].norm(dim=1)))
            return loss

        module.step = step
        run.fit(module)
        run.note(features)

    compare(program)


def test_backward_hooks(compare):
    def program(run):
        module = Classifier()
        for part in (module.net.b, module.net.c, module.net.head):
            part.register_full_backward_hook(lambda part, grad_in, grad_out: run.note(grad_out[0].norm()))
        run.fit(module)

    compare(program, served=None)


def test_function_mode_counts_operations_on_inputs(compare):
    """A profiler of the user's sees operations, on whatever tensors they are."""

    class Counts(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    def program(run):
        def step(module, x, y):
            with Counts():
                return F.cross_entropy(module.net(x), y)

        run.fit(Stepping(step))

    compare(program)


def test_dispatch_mode_around_the_network(compare):
    class Sees(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    def program(run):
        def step(module, x, y):
            with Sees():
                return F.cross_entropy(module.net(x), y)

        run.fit(Stepping(step))

    compare(program, served=None)


def test_anomaly_detection_and_profiler(compare):
    compare(lambda run: run.fit(Classifier(), detect_anomaly=True, profiler="simple"))


def test_module_is_copied_in_the_middle(compare):
    """A callback copies and saves the whole module between batches, and runs the copy."""

    def program(run):
        def look(trainer, module):
            twin = copy.deepcopy(module.net).eval()
            run.note(twin(torch.ones(6, 8)))
            file = io.BytesIO()
            torch.save(module.net, file)
            file.seek(0)
            run.note(torch.load(file, weights_only=False).eval()(torch.ones(6, 8)))

        run.fit(Classifier(), None, at(10, look))

    compare(program)


def test_module_is_copied_within_the_step(compare):
    def program(run):
        def step(module, x, y):
            loss = F.cross_entropy(module.net(x), y)
            if run.batches == 10:
                run.note(copy.deepcopy(module.net).eval()(x))
                run.note(copy.deepcopy(module.net.a).eval()(x))
            return loss

        run.fit(Stepping(step))

    compare(program)


@pytest.mark.parametrize("net", [Net, ConvNet])
def test_channels_and_activations_are_watched(compare, net):
    """Statistics of every module's output, as activation loggers take them, in the first batch of each epoch."""

    def program(run):
        module = Classifier(net())
        for part in module.net.modules():
            part.register_forward_hook(
                lambda part, args, out: run.note((out.mean(), out.std())) if run.batches % 4 == 0 else None
            )
        run.fit(module, loader(images()) if net is ConvNet else None)

    compare(program)
