"""Whatever a model is made of arrives, and a tensor arrives once."""

import dataclasses
import functools
import io
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import lightning as L
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_egeria.core.snapshots.packing import alike_in_few_blocks, copied, pack, unpack
from lightning_egeria.errors import WorkerError


def _as_received(value):
    """As it would be in another process."""
    return unpack(dataclasses.replace(pack(value, for_process=True).to_host(), received=True))


@pytest.fixture(params=[copied, _as_received])
def sent(request):
    return request.param


def same(first, second, *args):
    first, second = first.eval(), second.eval()
    with torch.no_grad():
        return torch.equal(first(*args), second(*args))


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 4),
        torch.ones(3).expand(2, 3),
        torch.randn(4).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.eye(3).to_sparse(),
    ],
)
def test_tensors(value, sent):
    found = sent({"value": (value, "text", None)})["value"]
    assert found[1:] == ("text", None)
    assert found[0].dtype == value.dtype
    assert torch.equal(found[0].to_dense(), value.to_dense())
    assert value.numel() == 0 or found[0].data_ptr() != value.data_ptr() if value.layout is torch.strided else True


def test_a_snapshot_does_not_follow_the_model():
    net = nn.Linear(2, 2)
    packed = pack(net, for_process=False).to_host()
    before = net.weight.detach().clone()
    nn.init.zeros_(net.weight)
    found = unpack(packed)
    assert torch.equal(found.weight, before)
    assert isinstance(found.weight, nn.Parameter)
    assert not found.weight.requires_grad


def test_tied_weights_stay_tied_and_travel_once():
    net = nn.ModuleDict({"a": nn.Linear(100, 100, bias=False), "b": nn.Linear(100, 100, bias=False)})
    net["b"].weight = net["a"].weight
    packed = pack(net, for_process=False)
    assert len(packed.tensors) == 1
    found = unpack(packed.to_host())
    assert found["a"].weight is found["b"].weight


def test_the_size_is_that_of_the_tensors_and_little_more():
    packed = pack(nn.Sequential(*(nn.Linear(64, 64) for _ in range(10))), for_process=True)
    weights = 10 * (64 * 64 + 64) * 4
    assert weights < packed.size_bytes < 1.1 * weights


def test_classes_functions_and_hooks_that_no_module_holds(sent):
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.activation = lambda x: x.relu() * factor

        def forward(self, x):
            return self.activation(self.inner(x))

    factor = 3.0
    net = Local()
    net.inner.register_forward_hook(lambda module, args, output: output + 1)
    assert same(net, sent(net), torch.randn(4, 3))


def test_an_activation_kept_on_the_module(sent):
    net = nn.Linear(3, 3)
    net.kept = net(torch.ones(1, 3))
    assert torch.equal(sent(net).kept, net.kept)


@pytest.mark.parametrize("normalised", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrised_weights(normalised, sent):
    net = nn.Sequential(normalised(nn.Linear(3, 3)), nn.ReLU()).eval()
    assert same(net, sent(net), torch.randn(4, 3))


def test_what_cannot_be_sent_complains_when_it_is_used(sent):
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.file = threading.Lock()

        def forward(self, x, log=False):
            if log:
                self.file.acquire()
            return self.inner(x)

    net = Logs()
    found = sent(net)
    assert same(net, found, torch.randn(4, 3))
    with pytest.raises(WorkerError, match="'file' cannot be copied"):
        found(torch.randn(4, 3), log=True)


@pytest.mark.parametrize("kind", [dict, threading.Lock])
def test_a_lightning_module_knows_that_it_is_in_host_memory(kind, sent):
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.attribute = kind()

        def forward(self, x):
            return self.inner(x) + torch.ones(3, device=self.device)

    net, x = Net(), torch.randn(4, 3)
    expected = net(x)
    net._device = torch.device("meta")
    assert torch.equal(sent(net)(x), expected)
    assert net.device == torch.device("meta")
    assert sent(torchmetrics.MeanMetric()).device == torch.device("cpu")


def test_data_that_hangs_on_a_module_stays_behind(sent):
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)
            data = TensorDataset(torch.zeros(50_000))
            self.train_set, self.sets, self.loaders = data, [data, Subset(data, range(9))], {"a": DataLoader(data)}
            self.data_module = L.LightningDataModule.from_datasets(data)
            self.inner.trainer_of_another = L.Trainer(accelerator="cpu", logger=False, barebones=True)

        def forward(self, x):
            return self.inner(x)

    net = Net()
    assert pack(net, for_process=True).size_bytes < 10_000
    found = sent(sent(net))
    assert same(net, found, torch.randn(4, 3))
    for read in (lambda: found.train_set.tensors, lambda: found.loaders["a"].dataset, lambda: found.data_module.x):
        with pytest.raises(WorkerError, match=r"holds a \w+, which .* because it holds data"):
            read()
    assert isinstance(net.train_set, TensorDataset)


@pytest.mark.parametrize("for_process", [False, True])
def test_an_argument_that_cannot_be_sent_raises(for_process):
    with pytest.raises(TypeError, match="generator"):
        pack((torch.ones(2), (x for x in range(3))), for_process)


def test_modules_of_a_script_arrive_in_another_process(tmp_path):
    """Defined in ``__main__`` without a guard, beside a module that only the script's folder holds."""
    (tmp_path / "beside.py").write_text(
        "import torch\nclass Double(torch.nn.Module):\n  forward = lambda self, x: 2 * x\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, beside\n"
        "from lightning_egeria.core.snapshots.packing import pack\n"
        "from lightning_egeria.core.snapshots.worker import Worker\n"
        "print('main ran')\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.twice = beside.Double()\n"
        "    def forward(self, x):\n"
        "        print('noise on standard output')\n"
        "        return self.twice(x)\n"
        "net = Net()\n"
        "worker = Worker(lambda: lambda net, x: net(x).tolist())\n"
        "print(worker.call(pack(net, True).to_host(), pack(torch.ones(2), True).to_host()).result(60))\n"
        "worker.close()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=_here())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "main ran\n[2.0, 2.0]\n"
    assert "noise on standard output" in done.stderr


def _here():
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def test_partial_functions_and_namespaces(sent):
    found = sent(types.SimpleNamespace(add=functools.partial(torch.add, torch.ones(2))))
    assert torch.equal(found.add(torch.ones(2)), torch.full((2,), 2.0))


def test_memory_for_many_tensors_lies_in_few_blocks(monkeypatch):
    monkeypatch.setattr("lightning_egeria.core.snapshots.packing.BLOCK_BYTES", 256)
    kinds = [torch.float32, torch.bool, torch.float64, torch.bfloat16, torch.complex128, torch.int64]
    values = [torch.arange(size).to(kind) for kind in kinds for size in (3, 0, 1, 100)] + [torch.tensor(5)]
    values.append(torch.arange(12.0).view(3, 4).T)
    hosts = alike_in_few_blocks(values)
    for host, value in zip(hosts, values, strict=True):
        host.copy_(value)
    assert all(map(torch.equal, hosts, values))
    assert all(host.is_contiguous() and host.dtype == value.dtype for host, value in zip(hosts, values, strict=True))
    assert len({host.untyped_storage().data_ptr() for host in hosts}) == 13  # of each dtype, the small ones share one
    saved = io.BytesIO()
    torch.save(hosts, saved)  # as in a checkpoint
    saved.seek(0)
    assert all(map(torch.equal, torch.load(saved, weights_only=True), values))
    versions = [host._version for host in hosts]
    hosts[0].add_(1)
    assert [host._version for host in hosts[1:]] == versions[1:]  # no one takes it for a change of theirs
    assert alike_in_few_blocks([]) == []


def test_what_was_packed_for_another_process_is_not_unpacked_here():
    with pytest.raises(WorkerError, match="packed for another process"):
        unpack(pack(nn.Linear(2, 2), for_process=True))


def test_a_copy_has_the_classes_and_functions_of_the_original():
    class Local(nn.Module):
        def forward(self, x):
            return self.activation(x)

    net = Local()
    net.activation, net.kind, net.module = torch.nn.functional.relu, Local, types
    method = Local.forward
    found = copied(net)
    assert type(found) is Local
    assert Local.forward is method
    assert (found.activation, found.kind, found.module) == (net.activation, Local, types)


def test_a_function_that_holds_a_part_of_the_network_holds_that_of_the_copy():
    """In its closure, in a default, and in functions that refer to each other and share a variable."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner, calls = net[1], 0

    def even(x, depth=2):
        nonlocal calls
        calls += 1
        return odd(x, depth - 1) if depth else inner(x)

    def odd(x, depth):
        return even(x, depth - 1)

    even.note = "kept"
    net.forward = lambda x, first=net[0]: even(first(x))
    found = copied(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    x = torch.ones(1, 2)
    assert net(x).abs().sum() == 0
    assert found(x).abs().sum() > 0
    assert calls == 2
    copy = found.forward.__closure__[0].cell_contents
    assert copy is not even
    assert copy.__globals__ is globals()
    assert copy.note == "kept"
    assert dict(zip(copy.__code__.co_freevars, copy.__closure__, strict=True))["calls"].cell_contents == 2  # its own
