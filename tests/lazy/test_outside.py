"""Padded samples: how long they were, and what stays the same however long they are padded."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from lightning_egeria.lazy.keys import Keys
from lightning_egeria.lazy.meta import Meta
from lightning_egeria.lazy.outside import Outside
from lightning_egeria.lazy.tape import Tape

SAMPLES = [torch.arange(1, 1 + length) for length in (3, 5, 2)]


def boundary(tokens):
    node, (leaf,) = node_of(tokens)
    return node, leaf


def test_the_length_of_a_sample_is_that_before_the_padding():
    node, _ = boundary(pad_sequence(SAMPLES, batch_first=True))
    outside = Outside()
    assert outside.fits(node, ragged=True)
    assert outside.sample_lengths(node) == [4, 5, 3]  # one position of the padding belongs to a sample


def test_samples_are_padded_if_a_tensor_of_them_has_the_length():
    node, leaf = boundary(pad_sequence(SAMPLES, batch_first=True))
    assert Outside().is_padded(node)
    leaf.value = leaf.value[:, :4]
    assert not Outside().is_padded(node)
    pooled, _ = boundary(pad_sequence(SAMPLES, batch_first=True))
    pooled.meta = Meta.of(torch.empty(3, 5))
    assert not Outside().is_padded(pooled)
    pooled.meta = Meta.of(torch.empty(3, 4, 5).transpose(1, 2))  # a beginning of these rows is not one piece
    assert not Outside().is_padded(pooled)


def with_mask(samples, mask):
    """A node that follows from padded samples and from a tensor that the program makes of them."""
    tokens = pad_sequence(samples, batch_first=True)
    return node_of(tokens, mask(tokens))


def with_table(samples, table):
    """A node that follows from padded samples and from a tensor that grows with their length."""
    return with_mask(samples, lambda tokens: table[: tokens.shape[1]])


def node_of(*tensors, width=4):
    """A node ``[samples, length, width]`` that follows from tensors of the program, as long as the first one."""
    tape = Tape(Keys(), len(tensors[0]), lambda places: [], lambda: None)
    leaves = [tape.outside(tensor) for tensor in tensors]
    meta = Meta.of(torch.empty(*tensors[0].shape, width))
    spec = torch.utils._pytree.tree_flatten((tuple(range(len(tensors))), {}))[1]
    (node,) = tape.record("embed", lambda *all_: all_[0], leaves, spec, [meta])
    return node, leaves


def test_stamps_are_the_same_however_long_a_batch_is():
    outside, places = Outside(), torch.arange(20)
    node, _ = with_table(SAMPLES, places)
    first = outside.stamps(node, ragged=True)
    assert outside.has_tables
    longer, _ = with_table([SAMPLES[0], torch.arange(1, 9), SAMPLES[2]], places)
    second = outside.stamps(longer, ragged=True)
    assert (second == first).tolist() == [True, False, True]
    assert (outside.stamps(node, ragged=True) == first).all()
    other, _ = with_table(SAMPLES, places.flip(0))  # another table
    assert not (outside.stamps(other, ragged=True) == first).any()


def test_a_sample_without_padding_is_known_again():
    outside = Outside()
    node, _ = with_table(SAMPLES, torch.arange(20))
    assert outside.fits(node, ragged=True)
    assert outside.learn_padding(node)
    first = outside.stamps(node, ragged=True)
    longer, _ = with_table([torch.arange(1, 9), SAMPLES[1], SAMPLES[2]], torch.arange(20))
    assert outside.stamps(longer, ragged=True)[1] == first[1]


def test_a_text_that_ends_in_two_equal_tokens_has_no_padding():
    whole = [torch.tensor([4, 7, 9, 9]), torch.tensor([3, 8, 2, 1])]
    node, (leaf, _) = with_mask(whole, lambda tokens: tokens > 0)
    outside = Outside()
    assert outside.fits(node, ragged=True)
    assert not outside.learn_padding(node)
    longer, _ = with_mask([torch.tensor([4, 7]), torch.arange(1, 9)], lambda tokens: tokens > 0)
    assert outside.fits(longer, ragged=True)
    assert outside.learn_padding(longer)
    assert outside.at_length(leaf, 4, 6)[:, 4:].tolist() == [[0, 0]] * 2


def test_tensors_at_other_lengths_are_those_of_such_batches():
    outside, places = Outside(), torch.arange(20)
    long, _ = with_table([torch.arange(1, 9), SAMPLES[1], SAMPLES[2]], places)
    assert outside.fits(long, ragged=True)
    assert outside.room(long) == 8
    node, (tokens, table) = with_table(SAMPLES, places)
    assert outside.fits(node, ragged=True)
    assert outside.room(node) == 8
    wanted = torch.cat([tokens.value, torch.zeros(3, 3, dtype=torch.int64)], 1)
    assert torch.equal(outside.at_length(tokens, 5, 8), wanted)
    assert torch.equal(outside.at_length(table, 5, 8), places[:8])
    assert torch.equal(outside.at_length(tokens, 5, 3), tokens.value[:, :3])
    assert torch.equal(outside.at_length(table, 5, 3), places[:3])
    assert outside.at_length(table, 5, 9) is None  # no batch was so long


def test_another_padding_is_not_made_longer():
    outside = Outside()
    long, _ = with_table([torch.arange(1, 9), SAMPLES[1]], torch.arange(20))
    node, leaves = with_table(SAMPLES, torch.arange(20))
    assert outside.fits(long, ragged=True)
    assert outside.fits(node, ragged=True)
    assert outside.room(long) == 8
    assert outside.room(node) == 8
    leaves[0].value[leaves[0].value == 0] = 7
    assert outside.room(node) == 5


def test_samples_are_those_of_the_first_batch():
    outside = Outside()
    first, _ = with_table(SAMPLES, torch.arange(20))
    assert outside.fits(first, ragged=True)
    node, leaves = with_table([torch.arange(1, 4), torch.arange(1, 3), torch.arange(1, 2)], torch.arange(20))
    assert outside.fits(node, ragged=True)  # as long as it is large
    assert [outside.has_samples(leaf) for leaf in leaves] == [True, False]
    assert outside.sample_lengths(node) == [3, 3, 2]
    assert torch.equal(outside.at_length(leaves[1], 3, 2), torch.arange(2))


@pytest.mark.parametrize(
    "mask",
    [
        lambda tokens: (tokens != 0) if (tokens == 0).any() else torch.ones(1, tokens.shape[1]).bool(),
        lambda tokens: (tokens != 0).t(),
        lambda tokens: (tokens != 0)[:, None, :].expand(-1, tokens.shape[1], -1).repeat_interleave(2, 0),
        lambda tokens: (tokens != 0).sum() * torch.ones(1),
    ],
    ids=["one row", "length first", "heads", "number"],
)
def test_a_mask_that_the_trial_did_not_try_is_not_known(mask):
    """The first batch has no padding, so that no row could depend on another row of the mask."""
    outside = Outside()
    whole = [torch.arange(1, 6)] * 3
    assert outside.stamps(with_mask(whole, mask)[0], ragged=True) is not None
    node, _ = with_mask([*whole[:2], torch.arange(1, 4)], mask)
    assert not outside.fits(node, ragged=True)
    assert outside.stamps(node, ragged=True) is None
    assert outside.stamps(with_mask(whole, mask)[0], ragged=True) is not None


def test_a_second_text_of_the_same_length_does_not_grow():
    """Its dimension has the length of the first text by chance."""
    outside = Outside()

    def pair(first, second):
        return node_of(torch.ones(3, first), torch.ones(3, second))

    node, leaves = pair(5, 5)
    assert outside.fits(node, ragged=True)
    assert outside.at_length(leaves[1], 5, 4).shape == (3, 4)
    assert outside.version == 0
    assert outside.fits(pair(6, 5)[0], ragged=True)
    assert outside.version == 1  # what was judged together is judged anew
    assert outside.fits(node, ragged=True)
    assert outside.version == 1
    assert outside.at_length(leaves[1], 5, 4).shape == (3, 5)


def test_a_mask_of_positions_is_a_table():
    outside = Outside()

    def square(tokens):
        return torch.ones(32, 32).tril()[: tokens.shape[1], : tokens.shape[1]]

    long, _ = with_mask([torch.arange(1, 9)], square)
    node, (_, leaf) = with_mask([torch.arange(1, 6)], square)
    assert outside.fits(node, ragged=True)
    assert outside.at_length(leaf, 5, 8) is None
    assert outside.fits(long, ragged=True)
    assert torch.equal(outside.at_length(leaf, 5, 8), torch.ones(8, 8).tril())
    assert outside.at_length(leaf, 5, 4).shape == (4, 4)
