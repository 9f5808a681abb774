"""Which layer modules are found, and which can be named."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.prefix import FrozenPrefix
from lightning_egeria.errors import LayerChainError
from support.networks import (
    Checkpointed,
    LargeHead,
    OutOfOrder,
    TiedHead,
    Tokens,
    Wrapped,
    deep_mlp,
    frozen_front,
    ids,
    images,
    loss_of,
    step,
    traced,
    vision,
)
from support.repeated_calls import Alternating, SharedEmbedding, UsedTwice


class TestWhatIsFound:
    def chain(self, net, *inputs, **kwargs):
        return LayerChain.trace(net, lambda: step(net, inputs), **kwargs)

    def test_execution_order_not_registration_order(self):
        chain = self.chain(OutOfOrder(), torch.rand(5, 4))
        assert chain.names == ("first", "second", "third")

    def test_modules_without_weights_join_the_one_before(self):
        chain = self.chain(deep_mlp(), torch.rand(5, 4))
        assert [(m.name, m.boundary) for m in chain.layer_modules] == [("0", "3"), ("4", "6"), ("7", "8")]
        assert [m.members for m in chain.layer_modules] == [("0", "1", "2", "3"), ("4", "5", "6"), ("7", "8")]

    def test_stem_of_a_resnet(self):
        chain = traced("resnet18")[2]
        assert (chain.layer_modules[0].name, chain.layer_modules[0].boundary) == ("conv1", "maxpool")
        assert chain.names[1:] == tuple(f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1))

    def test_parameters_that_a_container_owns(self):
        chain = self.chain(Tokens(), ids(3, 6))
        assert chain.names == ("embedding", "blocks.0", "blocks.1", "blocks.2")
        assert chain.prefix_parameters(1) == ("embedding.weight",)
        assert {"pos_embed", "cls_token"} <= set(chain.layer_modules[1].parameters)

    @pytest.mark.parametrize("attribute", ["model", "net", "_backbone", "students"])
    def test_any_attribute_name_and_any_number_of_wrappers(self, attribute):
        net = deep_mlp()
        for _ in range(3):
            net = Wrapped(net, attribute)
        chain = self.chain(net, torch.rand(5, 4))
        assert chain.names == tuple(f"{attribute}.{attribute}.{attribute}.{name}" for name in "047")
        assert chain.entries == ("",)

    def test_a_step_that_calls_the_network_itself(self):
        net = Wrapped(deep_mlp(), "net")
        chain = LayerChain.trace(net, lambda: step(net.net, (torch.rand(5, 4),)))
        assert chain.names == ("net.0", "net.4", "net.7")
        assert chain.entries == ("net",)

    def test_two_networks_one_behind_the_other(self):
        net = nn.ModuleDict({"decoder": deep_mlp(), "encoder": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))})
        chain = LayerChain.trace(net, lambda: loss_of(net["decoder"](net["encoder"](torch.rand(5, 3)))))
        assert chain.names == ("encoder.0", "encoder.1", "decoder.0", "decoder.4", "decoder.7")
        assert chain.entries == ("encoder", "decoder")

    def test_a_wrapper_beside_a_head_with_most_of_the_weights(self):
        assert self.chain(LargeHead(), images(16)).names == ("encoder.one", "encoder.two", "encoder.three")

    def test_tied_embedding_and_head_never_freeze(self):
        chain = self.chain(TiedHead(), ids(3, 6))
        assert chain.max_depth == 0
        (note,) = chain.notes
        assert "'embedding.weight'" in note
        assert "tied" in note
        assert self.chain(TiedHead(tied=False), ids(3, 6)).max_depth == 2

    def test_a_weight_tied_to_the_head_behind_an_untied_front(self):
        class Late(TiedHead):
            def forward(self, ids):
                return F.linear(super().forward(ids), self.b.weight @ self.embedding.weight.T)

        chain = self.chain(Late(tied=False), ids(3, 6))
        assert chain.max_depth == 0
        assert "'embedding.weight'" in chain.notes[0]

    def test_a_module_used_twice_freezes_with_all_between(self):
        chain = self.chain(UsedTwice(), torch.rand(5, 4))
        assert chain.names == ("a", "b", "d")
        assert {"b.weight", "c.weight"} <= set(chain.layer_modules[1].parameters)
        assert chain.notes == ("'c' runs between two calls of 'b' and freezes with it",)

    def test_siamese_use_has_the_layer_modules_of_one_call(self):
        net = deep_mlp()
        x, y = torch.rand(5, 4), torch.rand(5, 4)
        once = LayerChain.trace(net, lambda: net(torch.cat([x, y])).square().sum())
        twice = LayerChain.trace(net, lambda: (net(x) - net(y)).square().sum())
        assert twice == once

    def test_layers_that_take_turns_freeze_together(self):
        chain = self.chain(Alternating(), torch.rand(5, 4))
        assert chain.names == ("first", "b", "c")
        assert [layer_module.members for layer_module in chain.layer_modules] == [("first",), ("a", "b"), ("c",)]

    def test_an_embedding_of_two_stacks_freezes_first(self):
        chain = self.chain(SharedEmbedding(), ids(3, 6))
        assert chain.names == ("embedding", "encoder", "decoder", "out")
        assert chain.layer_modules[0].last_use == 2
        assert chain.notes == ()

    @pytest.mark.parametrize("teacher_first", [True, False])
    @pytest.mark.parametrize("own", [True, False])
    @pytest.mark.parametrize("names", [None, ["student.0", "student.4", "student.7"]])
    def test_a_teacher_under_no_grad_is_not_in_the_chain(self, teacher_first, own, names):
        net = nn.ModuleDict({"teacher": deep_mlp(), "student": deep_mlp()})
        teacher, student = net["student" if own else "teacher"], net["student"]

        def run():
            torch.manual_seed(1)
            x = torch.rand(5, 4)
            if teacher_first:
                with torch.no_grad():
                    target = teacher(x)
                return (student(x) - target).square().mean()
            output = student(x)
            with torch.no_grad():
                target = teacher(x)
            return (output - target).square().mean()

        chain = LayerChain.trace(net, run, names)
        assert chain.names == ("student.0", "student.4", "student.7")
        assert chain.max_depth == 2
        prefix = FrozenPrefix(net, chain)
        prefix.set_depth(2)
        run().backward()
        back = {"7.weight", "7.bias", "9.weight", "9.bias"}
        if names:
            back |= {"5.weight", "5.bias"}  # normalisation behind a named module is not part of it
        assert {name for name, p in net.named_parameters() if p.grad is not None} == {f"student.{n}" for n in back}

    def test_what_the_user_froze_is_no_layer_module(self):
        chain = self.chain(frozen_front(), torch.rand(5, 4))
        assert chain.names == ("0.4", "0.7", "0.9")

    @pytest.mark.parametrize("requires_grad", [True, False])
    def test_an_input_that_needs_a_gradient_is_no_weight(self, requires_grad):
        class Skip(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.head = deep_mlp(), nn.Linear(6, 2)

            def forward(self, x):
                return self.head(torch.cat([self.net(x), x], 1))

        chain = self.chain(Skip(), torch.rand(5, 4, requires_grad=requires_grad))
        assert chain.names == ("net.0", "net.4", "net.7", "net.9")
        assert chain.max_depth == 3
        assert chain.notes == ()

    def test_autocast_shares_one_copy_of_a_weight(self):
        net, x = UsedTwice(), torch.rand(5, 4)

        def run():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss_of(net(x))

        chain = LayerChain.trace(net, run)
        plain = self.chain(UsedTwice(), x)
        assert chain.names == plain.names
        assert chain.notes == plain.notes
        assert {m.name: set(m.parameters) for m in chain.layer_modules} == {
            m.name: set(m.parameters) for m in plain.layer_modules
        }
        assert len(set(chain.prefix_parameters(2))) == len(chain.prefix_parameters(2))

    def test_reentrant_checkpointing_is_refused(self):
        with pytest.raises(LayerChainError, match="use_reentrant=False"):
            self.chain(Checkpointed(use_reentrant=True), torch.rand(5, 4))

    def test_submodules_with_two_names(self):
        net = deep_mlp()
        holder = nn.Module()
        # The inside of the first layer module is registered once more, under a name that comes first.
        wrapped = nn.Sequential(nn.Sequential(net[0], net[1]), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))
        holder.alias, holder.net = net[0], wrapped
        chain = LayerChain.trace(holder, lambda: step(wrapped, (torch.rand(5, 4),)))
        prefix = FrozenPrefix(holder, chain)
        prefix.set_depth(2)
        assert not any(part.training for part in wrapped[0].modules())
        assert not wrapped[0][0].weight.requires_grad
        prefix.set_depth(0)
        named = LayerChain.trace(holder, lambda: step(wrapped, (torch.rand(5, 4),)), ["net.0.0", "net.1", "net.2"])
        assert named.names == ("alias", "net.1", "net.2")


class TestNamed:
    def chain(self, names, net=None):
        net = net or vision("resnet18")()[0]
        return LayerChain.trace(net, lambda: step(net, (images(32),)), names)

    def test_taken_as_they_are(self):
        net = vision("resnet18")()[0]
        chain = self.chain(["maxpool", "layer1", "layer2", "layer3"], net)
        assert chain.names == ("maxpool", "layer1", "layer2", "layer3")
        assert chain.max_depth == 3
        assert {name.split(".")[0] for name in chain.prefix_parameters(2)} == {"conv1", "bn1", "layer1"}
        prefix = FrozenPrefix(net, chain)
        prefix.set_depth(2)
        assert {path.split(".")[0] for path, part in net.named_modules() if not part.training} == {
            "conv1",
            "bn1",
            "relu",
            "maxpool",
            "layer1",
        }

    @pytest.mark.parametrize(
        ("name", "near"), [("layer5", "layer4"), ("layr1.0", "layer1.0"), ("conv_1", "conv1"), ("0.conv2", "0.conv2")]
    )
    def test_an_unknown_name_is_answered_with_near_ones(self, name, near):
        with pytest.raises(LayerChainError, match=f"layer_modules: the model has no module '{name}'.*{near}'"):
            self.chain(["conv1", name])

    def test_a_name_unlike_any_is_answered_with_the_first_ones(self):
        with pytest.raises(LayerChainError, match=r"no module 'zzzz'.*'conv1'"):
            self.chain(["conv1", "zzzz"])

    def test_a_module_that_was_not_called(self):
        net = Wrapped(deep_mlp(), "net")
        with pytest.raises(LayerChainError, match="does not depend on 'unused'"):
            LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),)), ["net.0", "unused"])

    @pytest.mark.parametrize("names", [["layer2", "layer1"], ["layer1", "layer1", "layer2"]])
    def test_wrong_order_is_answered_with_the_right_one(self, names):
        with pytest.raises(LayerChainError, match=r"execution order .*\['layer1', 'layer2'\], got"):
            self.chain(names)

    @pytest.mark.parametrize("names", [[], ["layer1"]])
    def test_fewer_than_two(self, names):
        with pytest.raises(LayerChainError, match=r"ResNet has .*, expected at least 2"):
            self.chain(names)
