"""Training steps that read their input now and then, in every way that torch, numpy and Python have."""

import copy
import io
import itertools
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.caching.parts import Chain, Classifier, ConvNet, Stepping, grid, images, loader

# Python and numpy.
VALUES = {
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x[1, 2]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().copy(),
    "numpy forced": lambda x: x.numpy(force=True).copy(),
    "asarray": lambda x: np.asarray(x).copy(),
    "numpy function": lambda x: np.square(x),
    "numpy save": lambda x: np.save(io.BytesIO(), x),
    "repr": repr,
    "str": str,
    "format": lambda x: f"{x[0, 0]:.3f} {x.sum():.3f}",
    "bool": lambda x: bool((x > 0).any()),
    "contains": lambda x: (x[0, 0].item() in x, 7.0 in x),
    "iterate": lambda x: [row.sum() for row in x],
    "unpack": lambda x: (lambda first, *others: (first, len(others)))(*x),
    "sorted by value": lambda x: sorted(x[:, 0], key=float),
    "sum of rows": lambda x: sum(x),
    "zip": lambda x: [a - b for a, b in itertools.pairwise(x)],
    "key of a dict": lambda x: {x: 1}[x],
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "as integers": lambda x: (x.long(), x.int()[0, 0].__index__()),
}


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def _in_a_thread(x):
    found = []
    thread = threading.Thread(target=lambda: found.append(x.mean().item()))
    thread.start()
    thread.join()
    return found


def _about(x):
    """Everything that can be asked of a tensor without a look at its values."""
    return [
        (torch.is_tensor(x), isinstance(x, torch.Tensor), torch.is_floating_point(x), torch.is_complex(x), x.type()),
        (x.dtype, x.device, x.layout, x.shape, x.size(), x.size(0), x.ndim, x.dim(), x.numel(), len(x), x.nbytes),
        (x.is_contiguous(), x.stride(), x.storage_offset(), x.element_size(), x.itemsize, x.is_pinned(), x.is_cuda),
        (x.is_leaf, x.requires_grad, x.grad, x.grad_fn, x.is_sparse, x.is_quantized, x.is_inference(), x._version),
        (x.get_device(), x.is_shared(), x.is_signed(), x.is_conj(), x.is_neg(), x.is_meta, x.is_nested),
        (torch.can_cast(x.dtype, torch.int64), torch.result_type(x, 1), torch.numel(x), hasattr(x, "no_such_name")),
    ]


# torch.
TENSORS = {
    "mean": lambda x: x.mean(),
    "norm": lambda x: torch.linalg.norm(x.detach()),
    "data": lambda x: x.data.sum(),
    "everything about it": _about,
    "compare": lambda x: ((x > 0).sum(), (x == x).all(), x.eq(0).any(), torch.equal(x, x.clone())),
    "finite": lambda x: (torch.isfinite(x).all(), torch.isnan(x).any(), torch.allclose(x, x + 0)),
    "index": lambda x: (x[0], x[-1, 2:], x[..., 1], x[:, None].shape, x[[0, 2]], x[x > 0], x[torch.tensor([1, 0])]),
    "select": lambda x: (
        x.select(0, 1),
        x.narrow(1, 2, 3),
        x.index_select(0, torch.tensor([1])),
        x.take(torch.tensor(3)),
    ),
    "split": lambda x: (x.unbind(), x.chunk(2), x.split(4), torch.tensor_split(x, 3)),
    "cat": lambda x: (torch.cat([x, x]), torch.stack([x, -x]), torch.hstack([x, x]), x.repeat(2, 1)),
    "views": lambda x: (x.view(-1), x.reshape(2, -1), x.T, x.flatten(), x.unsqueeze(0), x.expand(2, *x.shape), x.mT),
    "as strided": lambda x: (x.as_strided((2, 2), (8, 1)), x.unfold(1, 2, 2), x.diagonal()),
    "like": lambda x: (torch.zeros_like(x), torch.rand_like(x), x.new_ones(2), torch.empty_like(x).copy_(x)),
    "new tensor": lambda x: torch.as_tensor(x),
    "copies": lambda x: (x.clone(), x.contiguous(), x.to("cpu"), x.double(), x.to(x), x.cpu(), x.type(torch.float64)),
    "bits": lambda x: (x.view(torch.int32), x.half().view(torch.int16)),
    "out": lambda x: torch.add(x, 1, out=torch.empty(6, 8)),
    "assigned from": lambda x: torch.zeros(6, 8).index_put_((torch.arange(6),), x),
    "slice assigned": lambda x: torch.zeros(6, 8).__setitem__(slice(None), x),
    "foreach": lambda x: torch._foreach_norm([x, x.clone()]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "statistics": lambda x: (
        x.std(0),
        x.var(),
        x.quantile(0.5),
        torch.histc(x),
        x.median(),
        x.sort().values,
        x.topk(2),
    ),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "where": lambda x: (torch.where(x > 0, x, 0), x.nonzero(), x.masked_fill(x > 0, 0), torch.clamp(x, 0)),
    "dlpack": lambda x: torch.from_dlpack(x),
    "dlpack to numpy": lambda x: np.from_dlpack(x).copy(),
    "pointer": lambda x: x.data_ptr() != 0,
    "storage": lambda x: (x.untyped_storage().nbytes(), torch.frombuffer(x.numpy(), dtype=torch.float32)),
    "storage values": lambda x: bytes(x.untyped_storage()[:16]),
    "saved": _saved,
    "saved in a dict": lambda x: _saved({"image": x, "rows": [x[0]]}),
    "autocast": lambda x: torch.autocast("cpu", torch.bfloat16)(torch.mm)(x, x.T),
    "no grad": lambda x: torch.no_grad()(torch.square)(x),
    "inference": lambda x: torch.inference_mode()(torch.square)(x),
    "vmap": lambda x: torch.vmap(torch.sum)(x),
    "gradient": lambda x: torch.func.grad(lambda v: v.square().sum())(x),
    "jacobian": lambda x: torch.func.jacrev(lambda v: v.sum(0))(x),
    "forward mode": lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),)),
    "sparse": lambda x: x.to_sparse().values(),
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).int_repr(),
    "python function": lambda x: x.clone().apply_(lambda v: v * 2),
    "uniform": lambda x: torch.bernoulli(x.sigmoid()),
    "shuffled": lambda x: x[torch.randperm(len(x))],
    "embedding bag": lambda x: F.one_hot(x.argmax(1), 8),
    "distance": lambda x: (torch.cdist(x, x), F.cosine_similarity(x, x.flip(0))),
    "normalised": lambda x: (F.layer_norm(x, (8,)), F.normalize(x), x.softmax(1)),
    "thread": _in_a_thread,
    "set data": lambda x: nn.Parameter(x.clone()).sum(),
    "parameter": lambda x: nn.Parameter(x, requires_grad=False).sum(),
    "stays with a module": lambda x: nn.Module().register_buffer("x", x),
    "shared memory": lambda x: x.clone().share_memory_().sum(),
    "set": lambda x: torch.empty(0).set_(x),
    "subclass": lambda x: x.as_subclass(torch.Tensor).sum(),
}

NOW_AND_THEN = {
    "each third batch": lambda run: run.batches % 3 == 2,
    "first of the epoch": lambda run: run.batches % 4 == 0,
    "always": lambda run: True,
    "once": lambda run: run.batches == 9,
}


@pytest.mark.parametrize("read", grid(VALUES | TENSORS, every=7))
def test_input_is_read_now_and_then(compare, read):
    def program(run):
        def step(module, x, y):
            if run.batches % 4 == 1:
                run.note(read(x))
            return F.cross_entropy(module.net(x), y)

        run.fit(Stepping(step))

    compare(program)


@pytest.mark.parametrize(("when", "place"), grid(NOW_AND_THEN, ["before", "after", "both"], every=4))
def test_input_is_read_around_the_network(compare, when, place):
    def program(run):
        def step(module, x, y):
            if when(run) and place != "after":
                run.note(x.mean())
            loss = F.cross_entropy(module.net(x), y)
            if when(run) and place != "before":
                run.note(x.numpy().copy())
                loss = loss + x.square().mean()
            return loss

        run.fit(Stepping(step))

    compare(program)


# In place, before or after the network: the next reader sees the change, the data set does not.
IN_PLACE = {
    "mul_": lambda x: x.mul_(2),
    "+=": lambda x: x.__iadd__(1),
    "item": lambda x: x.__setitem__(0, 0.0),
    "mask": lambda x: x.__setitem__(x > 0, 0.0),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.ones_like(x)),
    "normal_": lambda x: x.normal_(),
    "data": lambda x: x.data.mul_(2),
    "detached": lambda x: x.detach().mul_(2),
    "view": lambda x: x.view(-1)[:5].zero_(),
    "row": lambda x: x[1].fill_(3),
    "numpy": lambda x: np.multiply(x.numpy(), 2, out=x.numpy()),
    "numpy shared": lambda x: np.asarray(x).__setitem__(slice(None), 0.5),
    "init": nn.init.ones_,
    "functional": lambda x: F.relu_(x),
    "out": lambda x: torch.add(x, 1, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0]), torch.ones(1, 8)),
    "dlpack": lambda x: torch.from_dlpack(x).mul_(2),
    "data replaced": lambda x: setattr(x, "data", torch.ones(6, 8)),
    "set_": lambda x: x.set_(torch.ones(6, 8)),
    "swap": lambda x: x.copy_(x.flip(0)),
}


@pytest.mark.parametrize(("change", "place"), grid(IN_PLACE, ["before", "after"], every=7))
def test_input_is_changed_in_place(compare, change, place):
    def program(run):
        def step(module, x, y):
            changes = run.batches in (5, 9)  # while the front trains, autograd needs the input as it was
            if changes and place == "before":
                change(x)
            loss = F.cross_entropy(module.net(x), y)
            if changes:
                if place == "after":
                    change(x)
                run.note(x)
            return loss

        run.fit(Stepping(step))

    compare(program)


def _penalty(module, x, y):
    x.requires_grad_(True)
    loss = F.cross_entropy(module.net(x), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def _adversarial(module, x, y):
    moved = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(module.net(moved), y), moved)
    return F.cross_entropy(module.net(x + 0.1 * gradient.sign()), y)


def _hooked(module, x, y):
    x.requires_grad_(True)
    x.register_hook(lambda gradient: module.seen.append(gradient.norm().item()))
    return F.cross_entropy(module.net(x), y)


def _tangent(module, x, y):
    outputs, tangents = torch.func.jvp(module.net, (x,), (torch.ones_like(x),))
    return F.cross_entropy(outputs, y) + tangents.square().mean()


def _penalty_elsewhere(module, x, y):
    return _penalty(module, x.flip(0).clone(), y) + F.cross_entropy(module.net(x), y)


@pytest.mark.parametrize("step", [_penalty, _penalty_elsewhere, _adversarial, _hooked, _tangent])
@pytest.mark.parametrize("period", [1, 4])
def test_gradient_of_the_input(compare, step, period):
    def program(run):
        def step_of(module, x, y):
            takes = run.batches and run.batches % period == period - 1
            return step(module, x, y) if takes else F.cross_entropy(module.net(x), y)

        module = Stepping(step_of, Chain() if step is _tangent else None)
        module.seen = []
        run.fit(module)
        run.note(module.seen)

    compare(program, served=None if period == 1 else True)


def test_image_is_logged_at_each_epoch(compare):
    class Logs(Classifier):
        def __init__(self, run):
            super().__init__(ConvNet())
            self.run = run

        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                grid = batch[0][:4].permute(0, 2, 3, 1).clamp(-1, 1).mul(127).add(128).byte()
                self.run.note(grid.numpy())
                self.log("brightness", batch[0].mean())
            return super().training_step(batch, batch_idx)

    compare(lambda run: run.fit(Logs(run), loader(images())))
