"""The graphs of the kinds of networks of the paper."""

import pytest

from lightning_egeria.methods.pipelining.decomposition import Parallel, decompose
from lightning_egeria.methods.pipelining.examples import EXAMPLES


@pytest.mark.parametrize(("name", "branches"), [("candle-uno", 7), ("dlrm", 8), ("multi-modal", 4)])
def test_each_has_its_branches(name, branches):
    graph = EXAMPLES[name]()
    found = decompose(graph)
    assert found.serialised == ()
    assert [len(part.parts) for part in found.tree.parts if isinstance(part, Parallel)] == [branches]
    assert all(node.backward_s == 2 * node.forward_s > 0 for node in graph.nodes)
