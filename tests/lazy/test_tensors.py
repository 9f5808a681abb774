"""An operation on a lazy tensor returns what it returns for the plain one."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from lightning_egeria.caching.record.tensors import LazyTensor, plain, stack
from support.caching.lazies import Source, described, is_lazy, lazy

X = torch.randn(4, 3, 6)
INTO = torch.randn(6, 2)

OPERATIONS = {
    "add": lambda x: x + 1,
    "two of them": lambda x: x * x - x,
    "reversed": lambda x: 1 - x,
    "matmul": lambda x: x @ INTO,
    "linear": lambda x: F.linear(x, INTO.t()),
    "row at matrix": lambda x: x[0, 0] @ INTO,
    "einsum": lambda x: torch.einsum("bij,jk->bki", x, INTO),
    "conv": lambda x: F.conv1d(x, torch.ones(2, 3, 3), padding=1),
    "pool": lambda x: F.max_pool1d(x, 2),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
    "layer norm": lambda x: F.layer_norm(x, (6,)),
    "softmax": lambda x: x.softmax(-1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "mean": lambda x: x.mean(),
    "std": lambda x: x.view(4, -1).std(1),
    "max": lambda x: x.max(1),
    "sort": lambda x: x.sort(-1),
    "topk": lambda x: x.topk(2),
    "argmax": lambda x: x.argmax(-1),
    "quantile": lambda x: x.quantile(0.5, dim=-1),
    "unique": lambda x: x.round().unique(),
    "nonzero": lambda x: (x > 0).nonzero(),
    "any": lambda x: bool((x > 100).any()),
    "where": lambda x: torch.where(x > 0, x, 0),
    "compared": lambda x: (x > 0.5, x == x),
    "mask": lambda x: x[x > 0],
    "index": lambda x: x[:, torch.tensor([2, 0])],
    "first row": lambda x: x[0],
    "slice": lambda x: x[1:, ..., ::2],
    "gather": lambda x: x.gather(1, torch.zeros(4, 1, 6, dtype=torch.long)),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(-1),
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(2, 0, 1).contiguous(),
    "view": lambda x: x.view(4, -1),
    "reshape": lambda x: x.transpose(0, 1).reshape(3, -1),
    "unsqueeze": lambda x: x.unsqueeze(1).expand(4, 2, 3, 6),
    "channels last": lambda x: x.unsqueeze(1).contiguous(memory_format=torch.channels_last),
    "chunk": lambda x: x.chunk(2),
    "split": lambda x: torch.split(x, [1, 3]),
    "unbind": lambda x: [row + 1 for row in x.unbind()],
    "loop": lambda x: [row.sum() for row in x],
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x + 1]),
    "pad": lambda x: F.pad(x, (1, 2)),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "half": lambda x: x.half().float(),
    "integers": lambda x: x.round().to(torch.int32),
    "complex": lambda x: torch.complex(x, x).abs(),
    "view as": lambda x: x.view(torch.int32),
    "norm": lambda x: x.norm(),
    "svd": lambda x: torch.linalg.svdvals(x[0]),
    "fft": lambda x: torch.fft.rfft(x),
    "cumsum": lambda x: x.cumsum(0),
    "in place": lambda x: x.mul_(2).add_(1),
    "copied in": lambda x: x.copy_(torch.ones(4, 3, 6)),
    "filled": lambda x: x[1].fill_(7),
    "assigned": lambda x: x.__setitem__((slice(None), 0), 3.0),
    "masked fill": lambda x: x.masked_fill_(x > 0, 0),
    "view in place": lambda x: x.view(-1)[5:9].zero_(),
    "unsqueezed in place": lambda x: x.unsqueeze_(0),
    "transposed in place": lambda x: x.transpose_(0, 1) + 1,
    "out": lambda x: torch.add(x, 1, out=torch.empty(4, 3, 6)),
    "out is the tensor": lambda x: torch.add(torch.ones(4, 3, 6), 1, out=x),
    "numpy": lambda x: x.numpy().sum(),
    "written by numpy": lambda x: np.negative(x.numpy(), out=x.numpy()),
    "array": lambda x: np.asarray(x)[1].tolist(),
    "item": lambda x: x[0, 0, 0].item(),
    "list": lambda x: x.tolist(),
    "text": lambda x: (repr(x), f"{x[0, 0, 0]:.3f}", str(x.mean())),
    "numbers": lambda x: (float(x.mean()), int(x.sum()), len(x), x.shape, x.stride(), x.dtype, x.numel(), x.dim()),
    "settings": lambda x: (x.requires_grad, x.is_leaf, x.is_contiguous(), x.device, x.layout, x.is_floating_point()),
    "data": lambda x: x.data[1:],
    "detach": lambda x: x.detach() + 1,
    "clone": lambda x: x.clone().mul_(2),
    "deepcopy": lambda x: copy.deepcopy(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "saved": lambda x: _saved(x),
    "dlpack": lambda x: torch.from_dlpack(x).mul_(2),
    "storage": lambda x: x.untyped_storage().nbytes(),
    "bytes": lambda x: bytes(x.numpy()),
    "new": lambda x: (x.new_zeros(2), torch.zeros_like(x), x.new_tensor([1.0])),
    "random": lambda x: (torch.rand_like(x), F.dropout(x, 0.5), x.bernoulli(0.5)),
    "multinomial": lambda x: x[0].abs().multinomial(2),
    "cross entropy": lambda x: F.cross_entropy(x[:, 0], torch.arange(4)),
    "gradient of another": lambda x: torch.autograd.grad((x * _weight()).sum(), _weight.last)[0],
    "gradient of itself": lambda x: torch.autograd.grad(x.requires_grad_().square().sum(), x)[0],
    "vmap": lambda x: torch.func.vmap(torch.sum)(x),
    "functional gradient": lambda x: torch.func.grad(lambda y: y.square().sum())(x),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
    "autocast": lambda x: _autocast(x),
    "equal": lambda x: (torch.equal(x, x + 0), torch.allclose(x, x), x.eq(0)),
    "membership": lambda x: 0.123 in x,
    "packed sequence": lambda x: pad_packed_sequence(PackedSequence(x[:, 0], (x[:1, 0, 0] * 0 + 4).long())),
    "places of a split": lambda x: torch.tensor_split(X, x[:2, 0, 0].clamp(1, 2).long()),
    "names of arguments": lambda x: (torch.fft.rfft(input=x), torch.linalg.svdvals(A=x[0])),
    "nuclear norm": lambda x: [(torch.norm(y, p="nuc"), y.norm("nuc")) for y in x.unbind()],
    "sparse": lambda x: torch.eye(3).to_sparse_csr() @ x[0],
}


def _weight():
    _weight.last = torch.ones(6, requires_grad=True)
    return _weight.last


def _saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def _autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ INTO


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("is_computed", [False, True])
def test_operation_is_that_of_the_plain_tensor(operation, is_computed):
    found = []
    for make in (torch.clone, lambda x: lazy(x - 1) + 1 if is_computed else lazy(x)):
        x = make((X - 1) + 1 if is_computed else X)
        torch.manual_seed(0)
        result = operation(x)
        found.append((described(result), described(x), torch.rand(())))
    assert repr(found[0]) == repr(found[1])


RECORDED = ["add", "matmul", "conv", "view", "chunk", "in place", "half", "softmax", "first row", "stack", "new"]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_operation_loads_nothing(name):
    source = Source(X)
    OPERATIONS[name](source.batch())
    assert source.loaded == []


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (1, 3), (0,)])
def test_nodes_are_stacked_as_their_tensors_are(order):
    one, other = Source(X), Source(X)
    found, wanted = stack([row.node for row in one.rows(order=order)]), torch.stack(other.rows(order=order))
    assert is_lazy(found)
    assert (found.node.rows, found.node.meta, one.tape.order) == (wanted.node.rows, wanted.node.meta, other.tape.order)
    assert described(found) == described(X[list(order)])


def test_nodes_of_other_shapes_are_stacked_as_tensors_are():
    rows = [row.node for row in Source([torch.ones(2), torch.ones(3)]).rows()]
    with pytest.raises(RuntimeError, match="equal size"):
        stack(rows)
    late = Source(X)
    rows = [row.node for row in late.rows()]
    late.tape.is_over = True
    assert stack(rows).equal(X)


def test_values_are_loaded_once():
    source = Source(X)
    x = source.batch()
    assert is_lazy(x)
    assert float(x.sum()) == float(X.sum())
    assert x.numpy().sum() == X.numpy().sum()
    assert len(source.loaded) == 4
    assert source.touched == 1
    assert x.is_known


@pytest.mark.parametrize("change", ["add_", "numpy", "item"])
def test_view_and_base_share_their_memory(change):
    """What is written to one is seen in the other, in whichever order they are computed."""
    found = []
    for x in (X.clone(), lazy(X)):
        view, further = x[1:], x.view(-1)
        if change == "add_":
            view.add_(1)
        elif change == "numpy":
            view.numpy()[:] = 5
        else:
            float(further[0])
            further[3:40].zero_()
        found.append((described(x), described(view), described(further)))
    assert found[0] == found[1]


def test_changed_tensor_has_another_key():
    x = lazy(X)
    keys = [x.node.key]
    x.add_(1)
    keys.append(x.node.key)
    x.numpy()[0] = 5
    keys.append(x.node.key)
    assert len(set(keys)) == 3


def test_program_keeps_its_tensor_through_changes():
    x = lazy(X)
    assert x.mul_(2) is x
    assert torch.add(X, 1, out=x) is x
    assert plain(x).equal(X + 1)


def test_error_of_an_operation_is_that_of_the_plain_tensor():
    errors = []
    for x in (X, lazy(X)):
        with pytest.raises(RuntimeError) as error:
            x @ torch.ones(5, 5)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_lazy_tensor_is_a_tensor():
    x = lazy(X)
    assert isinstance(x, torch.Tensor)
    assert isinstance(x, LazyTensor)
    assert str(type(x)) == str(torch.Tensor)  # some loggers go by the name
    assert plain(X) is X


NUMBERS = torch.randn(4, 3)


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray, torch.FloatTensor, torch.Tensor])
def test_a_tensor_of_numbers_takes_lazy_ones(make):
    batch = Source(NUMBERS).batch()
    assert make([batch[0, 0], batch[1, 1]]).equal(torch.stack([NUMBERS[0, 0], NUMBERS[1, 1]]))
    assert batch[0].new_tensor([batch[0, 0], 1.0]).equal(torch.stack([NUMBERS[0, 0], torch.tensor(1.0)]))


def test_a_view_tells_where_it_begins():
    assert Source(NUMBERS).batch()[2:].storage_offset() == NUMBERS[2:].storage_offset()


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_networks_get_their_input(kind):
    """Their kernels return fewer tensors than they announce."""
    net = kind(6, 6).requires_grad_(False)
    output, state = net(Source(X).batch())
    wanted, wanted_state = net(X)
    assert plain(output).equal(wanted)
    for one, other in zip(pytree.tree_leaves(state), pytree.tree_leaves(wanted_state), strict=True):
        assert plain(one).equal(other)
