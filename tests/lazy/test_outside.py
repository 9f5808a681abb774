"""Tensors that the program makes: what of them must stay, and what belongs to a sample."""

import pytest
import torch

from lightning_egeria.caching.record.keys import Keys
from lightning_egeria.caching.record.meta import MOST_BYTES, Meta
from lightning_egeria.caching.record.outside import Outside
from lightning_egeria.caching.record.tape import Tape

SAMPLES = 4


def node_of(*tensors, keys=None):
    """A node ``[samples, 3]`` that is the sum of tensors of the program."""
    tape = Tape(keys or KEYS, SAMPLES, lambda places: [], lambda: None)
    leaves = [tape.outside(tensor) for tensor in tensors]
    spec = torch.utils._pytree.tree_flatten((tuple(range(len(tensors))), {}))[1]
    run = lambda *values: sum(values[1:], values[0])  # noqa: E731
    (node,) = tape.record("sum", run, leaves, spec, [Meta.of(torch.empty(SAMPLES, 3))])
    assert node.key >= 0  # tensors are numbered in the order in which they are asked for
    return node, leaves


KEYS = Keys()


def test_without_tensors_of_the_program_all_samples_are_alike():
    tape = Tape(Keys(), SAMPLES, lambda places: [], lambda: None)
    assert Outside().stamps(tape.row(0, 0, Meta.of(torch.empty(3)))).tolist() == [0] * SAMPLES


def test_a_stamp_is_that_of_its_sample():
    outside, images = Outside(), torch.randn(SAMPLES, 3)
    first = outside.stamps(node_of(images)[0])
    assert len(set(first.tolist())) == SAMPLES
    order = [2, 0, 3, 1]
    assert outside.stamps(node_of(images[order])[0]).tolist() == first[order].tolist()
    images[1] += 1
    assert (outside.stamps(node_of(images)[0]) == first).tolist() == [True, False, True, True]


def test_a_stamp_goes_by_dtype_and_by_each_tensor():
    x, y = torch.zeros(SAMPLES, 3), torch.zeros(SAMPLES, 3)
    outside = Outside()
    first = outside.stamps(node_of(x, y)[0])
    y[2] = 1
    assert (outside.stamps(node_of(x, y)[0]) == first).tolist() == [True, True, False, True]
    assert not (Outside().stamps(node_of(x.int())[0]) == Outside().stamps(node_of(x)[0])).any()


def test_a_tensor_without_samples_must_stay():
    outside, images, places = Outside(), torch.randn(SAMPLES, 3), torch.randn(3)
    assert outside.stamps(node_of(images, places)[0]) is not None
    assert outside.fits(node_of(images + 1, places.clone())[0])
    assert not outside.fits(node_of(images, places + 1)[0])
    assert outside.stamps(node_of(images, places + 1)[0]) is None


@pytest.mark.parametrize("other", [torch.zeros(SAMPLES + 1, 3), torch.zeros(3), torch.zeros(SAMPLES, 3, 1)])
def test_a_tensor_with_samples_goes_on_having_them(other):
    outside = Outside()
    _, (leaf,) = node_of(torch.zeros(SAMPLES, 3))
    node, _ = node_of(torch.zeros(SAMPLES, 3))
    assert outside.fits(node)
    assert outside.has_samples(leaf)
    assert not outside.fits(node_of(other)[0])


def test_a_role_is_that_of_the_first_batch():
    """Another dimension may be as large as a batch."""
    outside = Outside()
    assert outside.fits(node_of(torch.zeros(SAMPLES, 3), torch.arange(3.0))[0])
    tape = Tape(KEYS, 3, lambda places: [], lambda: None)
    leaves = [tape.outside(torch.zeros(3, 3)), tape.outside(torch.arange(3.0))]
    spec = torch.utils._pytree.tree_flatten(((0, 1), {}))[1]
    (node,) = tape.record("sum", torch.add, leaves, spec, [Meta.of(torch.empty(3, 3))])
    assert node.key >= 0
    assert outside.fits(node)
    assert [outside.has_samples(leaf) for leaf in leaves] == [True, False]


def test_a_tensor_that_changed_since_is_not_known():
    large = torch.zeros(SAMPLES, MOST_BYTES // 8)  # too large to be copied
    node, _ = node_of(large)
    large.add_(1)
    assert Outside().stamps(node) is None


def test_some_samples_are_computed_again():
    outside, images, places = Outside(), torch.randn(SAMPLES, 3), torch.randn(3)
    node, _ = node_of(images, places)
    assert outside.fits(node)
    assert outside.replayed(node, [3, 1, 1, 0]).equal((images + places)[[3, 1, 1, 0]])
