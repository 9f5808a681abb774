"""Compiled modules are observed uncompiled, and compiled anew where torch does not do it by itself."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from lightning_egeria.core.network import compilation


def compiled(log):
    def backend(graph, example_inputs):
        log.append("compiled")
        return graph.forward

    return torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend=backend)


def test_inside_eager_a_compiled_module_runs_uncompiled():
    log, seen = [], []
    net = compiled(log)
    net(torch.ones(1, 2))
    assert log == ["compiled"]
    inner = net._orig_mod[0]
    original = inner.forward
    inner.forward = lambda x: seen.append(x) or original(x)
    with compilation.eager():
        net(torch.ones(1, 2))
    assert len(seen) == 1
    del inner.forward
    net(torch.ones(1, 2))
    assert log == ["compiled"]  # neither while it was observed nor afterwards


@pytest.mark.parametrize(("version", "again"), [("2.11.0+cpu", True), ("2.12.0", False), ("2.6.0a0+git1", True)])
def test_old_versions_of_torch_compile_anew_after_a_change(monkeypatch, version, again):
    log = []
    net = compiled(log)
    net(torch.ones(1, 2))
    monkeypatch.setattr(torch, "__version__", version)
    compilation.forget_compiled()
    net(torch.ones(1, 2))
    assert log == ["compiled"] * (2 if again else 1)


def test_a_process_that_never_compiles_imports_no_compiler():
    program = (
        "import sys; from lightning_egeria.core.network import compilation as c\n"
        "with c.eager(): pass\nc.forget_compiled(); sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
