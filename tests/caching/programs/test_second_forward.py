"""The network, or a part of it, runs more than once in a batch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.caching.parts import (
    BATCH,
    Classifier,
    ConvNet,
    Net,
    Samples,
    Stepping,
    Validated,
    grid,
    images,
    loader,
    on,
)


class Manual(Classifier):
    """Optimizes by hand: ``step(module, optimizer, x, y)``."""

    def __init__(self, step, net=None):
        super().__init__(net)
        self.step, self.automatic_optimization = step, False

    def training_step(self, batch, batch_idx):
        return self.step(self, self.optimizers(), *batch)


def _backward(module, optimizer, loss):
    optimizer.zero_grad()
    module.manual_backward(loss)
    return loss.detach()


def _sam(module, optimizer, x, y):
    """Sharpness-aware minimisation: the second gradient is taken at perturbed weights."""
    first = _backward(module, optimizer, F.cross_entropy(module.net(x), y))
    learning = [p for p in module.parameters() if p.grad is not None]
    moved = [p.grad * 0.05 for p in learning]
    with torch.no_grad():
        torch._foreach_add_(learning, moved)
    second = _backward(module, optimizer, F.cross_entropy(module.net(x), y))
    with torch.no_grad():
        torch._foreach_sub_(learning, moved)
    optimizer.step()
    return first + second


def _two_backwards(module, optimizer, x, y):
    optimizer.zero_grad()
    losses = [F.cross_entropy(module.net(x), y) for _ in range(2)]
    for loss in losses:
        module.manual_backward(loss)
    optimizer.step()
    return sum(losses).detach()


def _two_steps(module, optimizer, x, y):
    losses = []
    for _ in range(2):
        losses.append(_backward(module, optimizer, F.cross_entropy(module.net(x), y)))
        optimizer.step()
    return sum(losses)


def _closure(module, optimizer, x, y):
    def closure():
        return _backward(module, optimizer, F.cross_entropy(module.net(x), y))

    return optimizer.step(closure=closure)


def _halves(module, optimizer, x, y):
    """Two micro-batches of one batch."""
    optimizer.zero_grad()
    for rows, labels in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.cross_entropy(module.net(rows), labels)
        module.manual_backward(loss)
    optimizer.step()
    return loss.detach()


def _loss_after_the_step(module, optimizer, x, y):
    before = _backward(module, optimizer, F.cross_entropy(module.net(x), y))
    optimizer.step()
    with torch.no_grad():
        return before - F.cross_entropy(module.net(x), y)


MANUAL = [_sam, _two_backwards, _two_steps, _closure, _halves, _loss_after_the_step]


@pytest.mark.parametrize("step", MANUAL)
def test_manual_optimization(compare, step):
    # Two optimizer steps in a batch: freezes between batches all the same.
    compare(lambda run: run.fit(Manual(step), schedule={2: 2}), served=None)


@pytest.mark.parametrize(("step", "period"), grid([_sam, _two_backwards, _loss_after_the_step], [3, 5], every=4))
def test_second_forward_now_and_then(compare, step, period):
    def program(run):
        def sometimes(module, optimizer, x, y):
            if run.batches % period == period - 1:
                return step(module, optimizer, x, y)
            loss = _backward(module, optimizer, F.cross_entropy(module.net(x), y))
            optimizer.step()
            return loss

        run.fit(Manual(sometimes))

    compare(program)


# Automatic optimization: further forwards beside the one that trains.
EXTRA = {
    "same input": lambda module, x: module.net(x).mean(),
    "without gradient": lambda module, x: torch.no_grad()(module.net)(x).mean(),
    "flipped": lambda module, x: module.net(x.flip(1)).mean(),
    "noise": lambda module, x: module.net(torch.randn_like(x)).mean(),
    "constant": lambda module, x: module.net(torch.ones(BATCH, 8)).mean(),
    "half of the rows": lambda module, x: module.net(x[:3]).mean(),
    "other order": lambda module, x: module.net(x.flip(0)).mean(),
    "doubled": lambda module, x: module.net(torch.cat([x, x])).mean(),
    "the front alone": lambda module, x: module.net.b(module.net.a(x)).mean(),
    "one frozen layer": lambda module, x: module.net.a(x).mean(),
    "the second frozen layer on noise": lambda module, x: module.net.b(torch.randn_like(x)).mean(),
    "the part behind on noise": lambda module, x: module.net.head(module.net.c(torch.randn_like(x))).mean(),
    "the linear layer": lambda module, x: module.net.a[0](x).mean(),
    "forward method": lambda module, x: module.net.forward(x).mean(),
    "functional weights": lambda module, x: F.linear(x, module.net.a[0].weight).mean(),
    "functional_call": lambda module, x: torch.func.functional_call(
        module.net, {"a.0.weight": module.net.a[0].weight * 2}, (x,)
    ).mean(),
    "functional_call same": lambda module, x: torch.func.functional_call(
        module.net, dict(module.net.named_parameters()), (x,)
    ).mean(),
    "copied network": lambda module, x: copy.deepcopy(module.net)(x).mean(),
    "evaluation mode": lambda module, x: (module.net.eval()(x).mean(), module.net.train())[0],
    "per-sample gradients": lambda module, x: torch.func.vmap(
        torch.func.grad(lambda w, row: F.linear(row, w).sum()), (None, 0)
    )(module.net.head.weight, x).mean(),
    "input gradient": lambda module, x: (
        torch.autograd.grad(module.net(z := x.clone().requires_grad_(True)).sum(), z, create_graph=True)[0]
        .square()
        .mean()
    ),
    "doubled precision": lambda module, x: copy.deepcopy(module.net).double()(x.double()).float().mean(),
}


@pytest.mark.parametrize(("extra", "place", "period"), grid(EXTRA, ["before", "after"], [1, 4], every=11))
def test_further_forward(compare, extra, place, period):
    def program(run):
        def step(module, x, y):
            now = run.batches > 1 and run.batches % period == period - 1
            more = extra(module, x) if now and place == "before" else 0.0
            loss = F.cross_entropy(module.net(x), y)
            more = extra(module, x) if now and place == "after" else more
            return loss + 0.1 * more

        run.fit(Stepping(step))

    compare(program, served=None if period == 1 else True)


def _views(data, index):
    return data.x[index], data.x[index] + 0.1 * data.x[index - 1], data.y[index]


# Networks that are called for each of two inputs, ``a`` and ``b`` of a sample, from the first step on.
SIAMESE = {
    "two views": lambda net, a, b: (net(a), net(b)),
    "the second first": lambda net, a, b: (net(b), net(a))[::-1],
    "one behind the other": lambda net, a, b: net(torch.cat([a, b])).chunk(2),
    "noise": lambda net, a, b: (net(a), net(a + 0.1 * torch.randn_like(a))),
    "one input twice": lambda net, a, b: (net(a), net(a)),
    "layer by layer": lambda net, a, b: tuple(net.head(net.c(z)) for z in [net.b(y) for y in [net.a(a), net.a(b)]]),
    "a target without gradient": lambda net, a, b: (net(a), torch.no_grad()(net)(b)),
}


@pytest.mark.parametrize(("call", "workers"), grid(list(SIAMESE), [0, 2], every=3))
def test_siamese_networks(compare, call, workers):
    class Siamese(Classifier):
        def training_step(self, batch, batch_idx):
            a, b, y = batch
            if call == "one behind the other" or batch_idx % 3 < 2:
                first, second = SIAMESE[call](self.net, a, b)
            else:  # now and then in the other order
                second, first = SIAMESE[call](self.net, b, a)
            return F.cross_entropy(first, y) + F.mse_loss(first, second)

    def program(run):
        run.fit(Siamese(), loader(Samples(_views), num_workers=workers), schedule={2: 1, 6: 2}, max_epochs=4)

    compare(program, served=None if call in ("one behind the other", "the second first") else True)


@pytest.mark.parametrize("period", [1, 3])
def test_network_is_evaluated_in_a_callback(compare, period):
    def program(run):
        def look(trainer, module, outputs, batch, batch_idx):
            if run.batches % period == 0:
                with torch.no_grad():
                    run.note(module.net(batch[0]))

        run.fit(Classifier(), None, on(on_train_batch_end=look))

    compare(program)


def test_network_is_evaluated_in_front_of_the_step(compare):
    def program(run):
        def look(trainer, module, batch, batch_idx):
            with torch.no_grad():
                run.note(F.cross_entropy(module.net(batch[0]), batch[1]))

        run.fit(Classifier(), None, on(on_train_batch_start=look))

    compare(program, served=None)


class Checkpointed(Net):
    """Activation checkpointing of a part of the network, over the boundary or beside it."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        def run(modules, x):
            return checkpoint(nn.Sequential(*modules), x, use_reentrant=False)

        if self.part == "all":
            return self.head(run([self.a, self.b, self.c], x))
        if self.part == "front":
            return self.head(self.c(run([self.a, self.b], x)))
        if self.part == "over the boundary":
            return self.head(run([self.b, self.c], self.a(x)))
        if self.part == "each":
            return self.head(run([self.c], run([self.b], run([self.a], x))))
        return self.head(run([self.c], self.b(self.a(x))))


@pytest.mark.parametrize("part", ["all", "front", "over the boundary", "each", "behind"])
def test_activation_checkpointing(compare, part):
    compare(lambda run: run.fit(Classifier(Checkpointed(part))))


def test_whole_step_is_checkpointed(compare):
    def step(module, x, y):
        return checkpoint(lambda x: F.cross_entropy(module.net(x), y), x, use_reentrant=False)

    compare(lambda run: run.fit(Stepping(step)))


def test_saved_tensors_are_packed(compare):
    """Offloading of saved tensors: pickled, and read in the backward."""

    def program(run):
        def step(module, x, y):
            pack = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
            with pack:
                return F.cross_entropy(module.net(x), y)

        run.fit(Stepping(step))

    compare(program)


class Distilled(Classifier):
    """A teacher: the moving average of the network, on the same input."""

    def __init__(self, momentum=0.9, view=lambda x: x):
        super().__init__()
        self.teacher, self.momentum, self.view = copy.deepcopy(self.net).requires_grad_(False), momentum, view

    def loss_of(self, x, y):
        logits = self.net(x)
        with torch.no_grad():
            target = self.teacher(self.view(x)).softmax(-1)
        return F.cross_entropy(logits, y) + F.cross_entropy(logits, target)

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            for mean, new in zip(self.teacher.state_dict().values(), self.net.state_dict().values(), strict=True):
                mean.copy_(torch.lerp(mean.float(), new.float(), 1 - self.momentum))


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x + 0.1 * torch.randn_like(x)], ids=["same", "noisy"])
def test_distillation_from_a_moving_average(compare, view):
    compare(lambda run: run.fit(Distilled(view=view)))


def _two_masks(module, x, y):
    first, second = module.net(x), module.net(x)
    return F.cross_entropy(first, y) + F.mse_loss(first, second)


def _pairs(module, x, y):
    return (module.net(x) - module.net(x.roll(1, 0))).square().mean() + F.cross_entropy(module.net(x), y)


def _contrast(module, x, y):
    first, second = (F.normalize(module.net(x + 0.1 * torch.randn_like(x))) for _ in range(2))
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(x)))


@pytest.mark.parametrize("step", [_two_masks, _pairs, _contrast])
def test_network_twice_in_each_step(compare, step):
    def program(run):
        # The first step shows the layer chain, which a network that is called twice does not have.
        run.fit(Stepping(lambda m, x, y: step(m, x, y) if run.batches else F.cross_entropy(m.net(x), y)))

    compare(program, served=None)


class Skip(ConvNet):
    """Reads an output of the frozen front behind the boundary."""

    def __init__(self, from_, every=1):
        super().__init__()
        self.from_, self.every, self.calls = from_, every, 0
        self.side = nn.Linear(1 if from_ == "input" else 4, 3)

    def forward(self, x):
        self.calls += self.training
        outputs = {"input": x, "a": (a := self.a(x)), "b": (b := self.b(a))}
        logits = self.head(self.c(b.clone()).mean((2, 3)))
        return logits + self.side(outputs[self.from_].mean((2, 3))) if self.calls % self.every == 0 else logits


@pytest.mark.parametrize(("from_", "every", "depth"), grid(["input", "a", "b"], [1, 3], [1, 2], every=7))
def test_skip_connection_over_the_boundary(compare, from_, every, depth):
    compare(lambda run: run.fit(Classifier(Skip(from_, every)), loader(images()), schedule={2: depth}), served=None)


def test_auxiliary_head_reads_each_layer(compare):
    class Auxiliary(Net):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

        def forward(self, x):
            a = self.a(x)
            b = self.b(a)
            out = self.head(self.c(b))
            return (out, *(head(part) for head, part in zip(self.heads, (a, b), strict=True))) if self.training else out

    def step(module, x, y):
        return sum(F.cross_entropy(logits, y) for logits in module.net(x))

    compare(
        lambda run: run.fit(Stepping(step, Auxiliary()), freezing={"layer_modules": ["net.a", "net.b", "net.c"]}),
        served=None,
    )


def test_validation_within_the_step(compare):
    """A step that evaluates held-out data with the network now and then."""

    def program(run):
        held_out = torch.randn(BATCH, 8)

        def step(module, x, y):
            loss = F.cross_entropy(module.net(x), y)
            if run.batches % 4 == 3:
                module.net.eval()
                with torch.no_grad():
                    module.log("held out", module.net(held_out).mean())
                module.net.train()
            return loss

        run.fit(Stepping(step), val=None)

    compare(program)


def test_validation_step_calls_the_training_step(compare):
    class Shared(Validated):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.loss_of(*batch))
            self.log("val of noise", self.net(torch.randn(BATCH, 8)).mean())

    compare(lambda run: run.fit(Shared(), val=loader(shuffle=False)))
