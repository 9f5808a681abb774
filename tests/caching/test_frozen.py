"""Which modules are frozen, what stands in for their forwards, and that nothing of it stays."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_egeria.caching import policy
from lightning_egeria.caching.frozen import FrozenModules, FrozenSequence, Replacement
from lightning_egeria.caching.record.keys import Keys
from lightning_egeria.caching.record.meta import Meta
from lightning_egeria.caching.record.tape import Tape
from lightning_egeria.caching.record.tensors import LazyTensor, plain, stack
from lightning_egeria.errors import CacheError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Batch:
    """A batch of six samples, as far as frozen modules see it."""

    eager = wants_inner = False
    defers = True
    demands = 0

    def __init__(self, keys=None, x=X):
        self.tape = Tape(keys or Keys(), len(x), lambda places: [x[at] for at, _ in places], lambda: None, self)
        self.samples = len(x)
        self.x = stack([self.tape.row(at, 0, Meta.of(x[at])) for at in range(len(x))])

    def takes_outside(self, path, tensors):
        return False

    def ran_for(self, seconds):
        assert seconds >= 0

    def ran_at_once(self, nodes, is_kept):
        """A frozen module ran when it was called."""

    def asked(self, node):
        self.demands += 1
        return node.compute()


def linear():
    return nn.Linear(4, 4)


def frozen(module):
    return module.requires_grad_(False).eval()


class Net(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


class Block(nn.Module):
    """A module of two layers that is no sequence."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        return self.second(self.first(x).relu())


def run(model, found=None, keys=None, x=X):
    """The output for a batch, and the batch; and no module keeps its replacement."""
    batch = Batch(keys, x)
    found = FrozenModules(model) if found is None else found
    found.begin(batch)
    try:
        output = model(batch.x)
    finally:
        found.end()
    assert not any("forward" in vars(part) for part in model.modules())
    return output, batch


class TestWhatIsFound:
    def test_the_largest_frozen_modules(self):
        model = Net(a=frozen(Net(b=Block(), c=linear())), d=linear(), e=Net(f=frozen(linear()), g=linear()))
        found = FrozenModules(model)
        assert found.outermost == ["a", "e.f"]
        assert {"a.b", "a.b.first", "a.c"} < found.modules.keys()
        assert len(found) == 2
        assert found.has_inside("a.b")
        assert not found.has_inside("e.f")

    def test_the_model_itself_never_is(self):
        assert FrozenModules(frozen(Net(a=linear(), b=linear()))).outermost == ["a", "b"]

    def test_one_parameter_that_trains_is_enough(self):
        block = frozen(Block())
        block.first.bias.requires_grad_(True)
        assert FrozenModules(Net(a=block)).outermost == ["a.second"]

    def test_a_module_without_parameters_is_none(self):
        assert len(FrozenModules(Net(a=nn.ReLU(), b=nn.Flatten()))) == 0

    @pytest.mark.parametrize(
        ("part", "what"),
        [
            (nn.Dropout(0.1), "dropout"),
            (nn.Dropout2d(0.1), "dropout"),
            (nn.BatchNorm1d(4), "batch statistics"),
            (nn.BatchNorm1d(4, affine=False), "batch statistics"),
            (nn.MultiheadAttention(4, 1, dropout=0.1), "dropout"),
            (nn.LSTM(4, 4, num_layers=2, dropout=0.1), "dropout"),
        ],
    )
    def test_randomness_is_named_and_evaluation_ends_it(self, part, what):
        inner = Net(a=linear(), b=part).requires_grad_(False)
        found = FrozenModules(Net(inner=inner))
        assert found.random == {"inner": what}
        assert found.outermost[0] == "inner.a"
        inner.eval()
        assert FrozenModules(Net(inner=inner)).outermost == ["inner"]

    @pytest.mark.parametrize("part", [nn.Dropout(0), nn.LSTM(4, 4, dropout=0), nn.LayerNorm(4), nn.GroupNorm(2, 4)])
    def test_what_is_not_random_in_training_mode_is_frozen(self, part):
        inner = Net(a=linear(), b=part).requires_grad_(False).train()
        found = FrozenModules(Net(inner=inner))
        assert (found.outermost, found.random) == (["inner"], {})

    def test_it_is_seen_that_other_parameters_train_or_modes_change(self):
        model = Net(a=frozen(linear()), b=linear())
        found = FrozenModules(model)
        assert found.is_current(walk=True)
        model.b.requires_grad_(False)
        assert not found.is_current()
        found = FrozenModules(model)
        model.b.eval()
        assert not found.is_current()
        found = FrozenModules(model)
        model.c = linear()
        assert found.is_current()
        assert not found.is_current(walk=True)


class TestCalls:
    def test_a_frozen_module_records_its_call(self):
        model = Net(a=frozen(Block()))
        found = FrozenModules(model)
        run(model, found)  # the first call shows what comes back
        found.watch({"a"})
        for _ in range(policy.STABLE_BATCHES):
            found.count_batch()
        output, batch = run(model, found)
        assert isinstance(output, LazyTensor)
        assert not output.is_known
        assert batch.demands == 0
        assert plain(output).equal(model(X))

    def test_equal_calls_have_equal_keys_and_others_do_not(self):
        model, keys = Net(a=frozen(linear()), b=frozen(linear())), Keys()
        found = FrozenModules(model)
        first, again = (run(model, found, keys)[0].node.key for _ in range(2))
        assert first == again
        for other in (Net(b=model.a, a=model.b), Net(a=model.a)):
            assert run(other, None, keys)[0].node.key != first

    def test_modules_that_train_get_true_tensors(self):
        class Typed(nn.Linear):
            def forward(self, x):
                types.append(type(x))
                return super().forward(x)

        types = []
        model = Net(a=frozen(linear()), b=Typed(4, 4))
        output, batch = run(model)
        assert types == [torch.Tensor]
        assert output.requires_grad
        assert output.equal(model(X))
        assert batch.demands > 0

    @pytest.mark.parametrize("trains", [False, True])
    def test_a_trained_module_that_writes_into_a_cached_value(self, trains):
        class Writes(nn.Linear):
            def forward(self, x):
                return super().forward(x.add_(self.bias if trains else 1))

        model = Net(a=frozen(linear()), b=Writes(4, 4))
        if trains:
            with pytest.raises(CacheError, match="the module 'b' adds what it trains to its input in place"):
                run(model)
        else:
            output, _ = run(model)
            assert output.equal(model(X))

    @pytest.mark.parametrize("form", [tuple, list, lambda pair: {"x": pair[0], "y": pair[1]}])
    def test_trees_come_back_as_trees(self, form):
        class Pair(nn.Linear):
            def forward(self, x):
                return form([super().forward(x), x * 2])

        model = Net(a=frozen(Pair(4, 4)))
        found = FrozenModules(model)
        for _ in range(2):
            output, _ = run(model, found)
        assert type(output) is type(form([1, 2]))
        values = output.values() if isinstance(output, dict) else output
        wanted = model(X).values() if isinstance(output, dict) else model(X)
        assert all(isinstance(one, LazyTensor) for one in values)
        assert all(plain(one).equal(other) for one, other in zip(values, wanted, strict=True))

    @pytest.mark.parametrize(
        ("returns", "reason"),
        [
            (lambda x: x + torch.rand(4), "draws random numbers"),
            (lambda x: (x, float(x.sum())), "returns a number that may depend on values"),
            (lambda x: (x, x[1:]), "returns tensors that share memory"),
            (lambda x: (x, object()), "returns something else than tensors"),
        ],
    )
    def test_a_call_that_cannot_be_recorded_opens_the_module(self, returns, reason):
        class Odd(Block):
            def forward(self, x):
                return returns(super().forward(x))

        model = Net(a=frozen(Odd()))
        found = FrozenModules(model)
        run(model, found)
        assert reason in found.refused
        assert "'a'" in found.refused
        assert found.modules["a"].is_open
        _, batch = run(model, found)
        assert {"a.first", "a.second"} <= found.called  # the frozen modules inside record themselves
        assert batch.samples == 6

    def test_hooks_inside_open_a_module_for_the_batch(self):
        model = Net(a=frozen(Block()))
        found, seen = FrozenModules(model), []
        handle = model.a.second.register_forward_hook(lambda module, args, output: seen.append(output))
        output, _ = run(model, found)
        assert plain(seen[0]).equal(plain(output))
        assert found.refused == "'a' has hooks on modules inside it"
        handle.remove()
        assert not found.modules["a"].is_open

    def test_under_torch_func_a_module_runs(self):
        model = Net(a=frozen(linear()))
        found = FrozenModules(model)
        found.begin(Batch())
        try:
            assert torch.func.vmap(model)(X).equal(torch.func.vmap(nn.Linear.forward, (None, 0))(model.a, X))
        finally:
            found.end()

    def test_another_batch_is_not_its_own(self):
        """A lazy tensor of the batch before gets its values."""
        model, before = Net(a=frozen(linear())), Batch()
        found = FrozenModules(model)
        found.begin(Batch())
        output = model(before.x)
        found.end()
        assert type(output) is torch.Tensor
        assert output.equal(model(X))


class TestSequences:
    def test_the_layers_a_sequence_begins_with_are_one_call(self):
        model = Net(s=nn.Sequential(frozen(linear()), nn.ReLU(), frozen(linear()), linear()))
        found, keys = FrozenModules(model), Keys()
        (sequence,) = found.sequences
        assert isinstance(sequence, FrozenSequence)
        assert sequence.paths == ("s.0", "s.1", "s.2")
        for _ in range(3):
            output, _ = run(model, found, keys)
            assert output.equal(model(X))
        assert sequence.seen is not None

    @pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(4, affine=False)])
    def test_it_ends_at_what_is_random(self, layer):
        sequence = nn.Sequential(frozen(linear()), nn.ReLU(), layer, frozen(linear()))
        (found,) = FrozenModules(Net(s=sequence)).sequences
        assert found.paths == ("s.0", "s.1")

    def test_another_layer_in_it_is_seen(self):
        model = Net(s=nn.Sequential(frozen(linear()), frozen(linear()), linear()))
        found, keys = FrozenModules(model), Keys()
        for _ in range(2):
            run(model, found, keys)
        model.s[1] = frozen(linear())
        output, _ = run(model, found, keys)
        assert output.equal(model(X))


class TestItLeavesNothing:
    def test_forwards_are_put_and_restored(self):
        model = Net(a=frozen(Block()), b=linear())
        own = model.a.forward = model.a.forward  # other code has set it
        found = FrozenModules(model)
        found.begin(Batch())
        assert isinstance(vars(model.a)["forward"], Replacement)
        assert isinstance(vars(model.b)["forward"], Replacement)
        found.end()
        found.end()
        assert vars(model.a)["forward"] is own
        assert "forward" not in vars(model.b)

    def test_what_replaces_a_forward_meanwhile_stays(self):
        model = Net(a=frozen(linear()))
        found = FrozenModules(model)
        found.watch({"a"})
        found.begin(Batch())
        mine = model.a.forward = lambda x: x
        found.end()
        assert vars(model.a)["forward"] is mine
        assert found.missing() == "a"

    def test_a_replaced_module_is_missing(self):
        model = Net(a=frozen(linear()))
        found = FrozenModules(model)
        found.watch({"a"})
        assert found.missing() is None
        model.a = frozen(linear())
        assert found.missing() == "a"

    @pytest.mark.parametrize("make", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_a_copy_in_the_middle_of_a_batch_computes_by_itself(self, make):
        model = Net(a=frozen(nn.Sequential(linear(), nn.ReLU())), b=linear())
        found = FrozenModules(model)
        found.begin(Batch())
        copied = make(model)
        found.end()
        copied.a[0].weight.data.zero_()
        assert not copied(X).equal(model(X))
        assert model(X).equal(model.b(model.a(X)))


class TestWhatIsKept:
    def test_a_module_that_is_called_in_vain_runs(self):
        model = Net(a=frozen(linear()), b=frozen(linear()))
        found = FrozenModules(model)
        found.watch({"a"})
        for number in range(policy.CALLED_IN_VAIN):
            assert set(found.modules) == {"a", "b"}, number
            found.called = {"a", "b"}
            found.leave_out_unused()
        run(model, found)  # modules leave when a batch is over
        assert set(found.modules) == {"a"}
        output, _ = run(model, found)
        assert plain(output).equal(model(X))

    def test_weights_of_watched_modules_are_compared(self):
        model = Net(a=frozen(linear()), b=frozen(linear()))
        found = FrozenModules(model)
        assert not found.changed()
        found.watch({"a"})
        model.b.weight.mul_(2)
        assert not found.changed()
        model.a.weight.mul_(2)
        assert found.changed() == {"a"}

    def test_a_digest_is_that_of_the_values(self):
        model = Net(a=frozen(linear()), b=frozen(linear()))
        other = copy.deepcopy(model)
        first, second = FrozenModules(model), FrozenModules(other)
        assert first.digest_of({"a", "b"}) == second.digest_of({"b", "a"})
        assert first.digest_of({"a"}) != first.digest_of({"b"})
        other.a.bias.add_(1)
        assert first.digest_of({"a"}) != second.digest_of({"a"})

    def test_after_a_deeper_freeze_the_watched_ones_are_still_there(self):
        model = Net(a=Block(), b=linear())
        model.a.first.requires_grad_(False)
        before = FrozenModules(model)
        before.watch({"a.first"})
        frozen(model.a)
        after = FrozenModules(model, before=before)
        assert after.outermost == ["a"]
        assert before.is_part_of(after)
        assert after.modules["a"].is_open  # what is kept would be hidden in it
        model.a.requires_grad_(True)
        assert not before.is_part_of(FrozenModules(model, before=after))
