"""Compiled models: evaluations do not compile anew, and a freeze takes effect."""

import pytest
import torch

from lightning_egeria import ScriptedPolicy
from support.freezing.setups import Watching, freezing, new
from support.models import After, equal, fit, slow

# torch's own, where it compiles the optimizer's step, or a module of which a part is compiled already
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

COMPILED = []


def counting_backend(graph, example_inputs):
    """A function of this module, or the reference would have a copy that counts for itself."""
    from torch._dynamo.backends.debugging import aot_eager  # slow, and changes what the callback does

    COMPILED.append(len(example_inputs))
    return aot_eager(graph, example_inputs)


@pytest.mark.parametrize(
    "way",
    [
        "the LightningModule",
        "the network",
        slow("the network in place"),
        "the training step",
        slow("the optimizer's step"),
    ],
)
class TestCompiled:
    """`torch.compile`, with a backend that counts how often it is asked."""

    def compiled(self, way):
        torch.compiler.reset()
        COMPILED.clear()
        module, backend = new(), counting_backend
        if way == "the LightningModule":
            return torch.compile(module, backend=backend), module
        if way == "the network":
            module.net = torch.compile(module.net, backend=backend)
        elif way == "the network in place":
            module.net.compile(backend=backend)
        elif way == "the training step":
            module.training_step = torch.compile(module.training_step, backend=backend)
        else:  # Lightning hands it the training step, with all callbacks in it
            own = module.configure_optimizers

            def configure_optimizers():
                optimizer = own()
                optimizer.step = torch.compile(optimizer.step, backend=backend)
                return optimizer

            module.configure_optimizers = configure_optimizers
        return module, module

    def test_evaluations_do_not_change_training_nor_compile_anew(self, way):
        counts, states = [], []
        for callbacks in ([], [freezing(Watching())]):
            module, inner = self.compiled(way)
            fit(module, *callbacks, epochs=6)
            states.append(inner)
            counts.append(len(COMPILED))
        assert callbacks[0].savings().evaluations_done > 5
        assert 0 < counts[1] <= counts[0]
        assert equal(*states)

    def test_freezing_stops_and_unfreezing_starts_learning(self, way):
        module, _ = self.compiled(way)
        seen = {}

        def look(trainer, pl_module):
            weight = next(iter(dict(pl_module.net.named_parameters()).values()))
            seen[trainer.global_step] = (weight.detach().clone(), weight.grad is None)

        callback = freezing(ScriptedPolicy({4: 2, 8: 0}))
        fit(module, callback, After(look, 3, 4, 5, 7, 8, 9))
        assert len(callback.layer_modules) == 3
        assert not torch.equal(seen[3][0], seen[4][0])
        assert torch.equal(seen[4][0], seen[7][0])
        assert seen[5][1]
        assert torch.equal(seen[7][0], seen[8][0])
        assert not torch.equal(seen[8][0], seen[9][0])
