"""A frozen prefix is cut from autograd, and nothing in front of it trains, also not what the first step left out."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.user_programs import Blocks, Notes, SavesAt, run, same, scripted, vectors, weights_of


class Through(torch.autograd.Function):
    """Counts the backward passes through blocks without a parameter that trains."""

    passes = 0

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        Through.passes += 1
        return gradient


class Block(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), drop

    def forward(self, x):
        if self.drop and self.training and torch.rand(()) < self.drop:
            return x  # stochastic depth
        if not any(parameter.requires_grad for parameter in self.parameters()):
            x = Through.apply(x)
        return x + nn.functional.gelu(self.norm(self.linear(x)))


class Stack(nn.Module):
    """Blocks behind an embedding whose output requires a gradient, as PEFT makes it for checkpointing."""

    def __init__(self, checkpoints=False, hook=True, drop=0.0, layerdrop=0.0):
        super().__init__()
        self.checkpoints, self.layerdrop, self.inside = checkpoints, layerdrop, not hook
        self.embedding = nn.Linear(8, 8).requires_grad_(False)
        if hook:
            self.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
        self.blocks = nn.ModuleList(Block(drop) for _ in range(6))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embedding(x)
        if self.inside:
            x = x.requires_grad_(True)
        for block in self.blocks:
            if self.layerdrop and self.training and torch.rand(()) < self.layerdrop:
                continue
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints and block.training else block(x)
        return self.head(x)


class Stacked(Blocks):
    def __init__(self, **arguments):
        super().__init__(0)
        torch.manual_seed(3)
        self.net = Stack(**arguments)
        self.held = []

    def training_step(self, batch, _):
        held = []

        def pack(tensor):
            held.append(0 if isinstance(tensor, nn.Parameter) else tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = super().training_step(batch, _)
        self.held.append(sum(held))
        return loss


class ByHand(L.Callback):
    """Freezes the first blocks after step 5, as a careful user would."""

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 5:
            for block in module.net.blocks[:3]:
                block.requires_grad_(False).eval().zero_grad(set_to_none=True)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("hook", [False, True])
def test_input_gradients_of_adapters_are_cut(hook, checkpoints):
    """Public reports: peft 1142, transformers 42489."""
    hand, ours = (Stacked(checkpoints=checkpoints, hook=hook) for _ in range(2))
    run(hand, ByHand())
    Through.passes = 0
    said = run(ours, scripted({5: 3}))
    assert Through.passes == 0
    assert ours.held[9] < ours.held[3]
    assert same(hand, ours)
    assert said == []


def test_unfreezing_restores_them():
    hand, ours = Stacked(), Stacked()
    run(hand, epochs=1)
    run(ours, scripted({2: 3, 3: 0}), epochs=1)
    assert all(parameter.requires_grad for parameter in ours.net.blocks.parameters())
    assert not any(part._forward_pre_hooks for part in ours.modules())
    assert ours.held[3:] == hand.held[3:]


class Attacks(Blocks):
    """Its gradient of the input is wanted: an adversarial step."""

    def training_step(self, batch, _):
        x = batch[0].clone().requires_grad_(True)
        loss = nn.functional.cross_entropy(self.net(x), batch[1])
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        self.found = float(gradient.abs().sum())
        return loss + nn.functional.cross_entropy(self.net(batch[0] + 0.01 * gradient.sign()), batch[1])


def test_a_gradient_that_the_program_wants_stays_and_a_message_says_so():
    module = Attacks()
    said = run(module, scripted({5: 3}))
    assert module.found > 0
    (text,) = said
    assert "autograd runs through the frozen layer modules, because 'net' gets an input that requires" in text


@pytest.mark.parametrize("dropping", [{"layerdrop": 0.3}, {"layerdrop": 0.5}, {"drop": 0.5}])
@pytest.mark.parametrize("seed", range(4))
def test_layers_left_out_at_random_are_in_the_chain(dropping, seed):
    """Public reports: speechbrain 2340, s3prl 192; and stochastic depth."""
    module, callback = Stacked(hook=False, **dropping), scripted({5: 2})
    module.net.inside = False
    notes = Notes(weights_of("net", "blocks"))

    class Seeds(L.Callback):
        def on_train_start(self, *_):
            torch.manual_seed(seed)

    run(module, Seeds(), notes, callback)
    frozen = [int(name.removeprefix("net.blocks.")) for name in callback.layer_modules[: callback.frozen_depth]]
    size = sum(parameter.numel() for parameter in module.net.blocks[0].parameters())
    deepest, step = max(frozen), callback.events[0].step
    for block in range(deepest + 1):  # whatever lies in front of a frozen one is frozen
        part = slice(block * size, (block + 1) * size)
        assert all(torch.equal(seen[part], notes.seen[step][part]) for seen in notes.seen[step:]), block


class Branch(Blocks):
    """A branch in front runs in some steps only, and not in the first: a module, or a mask that is written in place."""

    def __init__(self, kind, every):
        super().__init__(5)
        self.every, self.kind = every, kind
        self.branch = nn.Linear(8, 8)
        self.token = nn.Parameter(torch.ones(8))

    def training_step(self, batch, _):
        x = batch[0].clone()
        if self.trainer.global_step % self.every == self.every - 1:
            if self.kind == "module":
                x = x + self.branch(x)
            else:
                x[0] = self.token
        return nn.functional.cross_entropy(self.net(x), batch[1])


@pytest.mark.parametrize("every", [3, 10])
@pytest.mark.parametrize("kind", ["module", "mask"])
def test_a_branch_in_front_is_noticed_and_freezes(kind, every):
    module, callback = Branch(kind, every), scripted({5: 2})
    name = "branch" if kind == "module" else "token"
    notes = Notes(lambda module: torch.cat([p.detach().flatten() for n, p in module.named_parameters() if name in n]))
    said = run(module, notes, callback)
    assert any(name in text and "runs in front of frozen layer modules now. It freezes with" in text for text in said)
    # A mask that the module itself writes is seen in the step after the first that uses it.
    last = 2 * every if kind == "mask" else every
    assert all(torch.equal(seen, notes.seen[max(5, last)]) for seen in notes.seen[max(5, last) :])
    assert name in " ".join(callback.chain.layer_modules[0].parameters)
    assert all(parameter.requires_grad for parameter in module.parameters())  # `fit` is over


class BranchBehind(Blocks):
    """A branch behind the frozen layers trains on, from its first step."""

    def __init__(self):
        super().__init__(5)
        self.branch = nn.Linear(8, 8)

    def training_step(self, batch, _):
        x = self.net[:4](batch[0])
        if self.trainer.global_step % 4 == 3:
            x = x + self.branch(x)
        return nn.functional.cross_entropy(self.net[4:](x), batch[1])


def test_a_branch_behind_trains_as_if_frozen_by_hand():
    class Hand(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_step == 5:
                module.net[:2].requires_grad_(False).zero_grad(set_to_none=True)

    hand, ours = BranchBehind(), BranchBehind()
    run(hand, Hand())
    said = run(ours, scripted({5: 2}))
    assert same(hand, ours)
    assert said == []


class Reused(Blocks):
    """A frozen block is used again, behind layers that train, in some steps."""

    def training_step(self, batch, _):
        x = self.net[:4](batch[0])
        if self.trainer.global_step % 4 == 3:
            x = self.net[0](x)
        return nn.functional.cross_entropy(self.net[4:](x), batch[1])


def test_a_block_that_is_used_again_passes_gradients_on():
    class Hand(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_step == 5:
                module.net[:2].requires_grad_(False).zero_grad(set_to_none=True)

    hand, ours = Reused(5), Reused(5)
    run(hand, Hand())
    run(ours, scripted({5: 2}))
    assert same(hand, ours)


class Adversary(Blocks):
    """A generator trains through the frozen front of its critic, with an optimizer of its own."""

    def __init__(self):
        super().__init__(5)
        self.automatic_optimization, self.generator = False, nn.Linear(8, 8)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.net, self.generator)]

    def training_step(self, batch, batch_idx):
        critic, generator = self.optimizers()
        self.toggle_optimizer(critic)
        critic.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        critic.step()
        self.untoggle_optimizer(critic)
        if self.trainer.global_step > 3:
            self.toggle_optimizer(generator)
            generator.zero_grad()
            self.manual_backward(-self.net(self.generator(batch[0])).mean())
            generator.step()
            self.untoggle_optimizer(generator)


def test_a_generator_trains_through_frozen_layers():
    module, callback = Adversary(), scripted({6: 2})
    notes = Notes(weights_of("generator"))
    run(module, notes, callback)
    assert callback.frozen_depth == 2
    assert not torch.equal(notes.seen[-1], notes.seen[-2])


def test_an_extended_chain_is_resumed(tmp_path):
    whole, resumed = Branch("module", 3), Branch("module", 3)
    run(whole, scripted({5: 2}), SavesAt(tmp_path, 16))
    again = scripted({5: 2})
    run(resumed, again, ckpt_path=tmp_path / "16.ckpt")
    assert same(whole, resumed)
    assert "branch.weight" in again.chain.layer_modules[0].parameters


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # newer versions have another name for it
def test_peft_with_checkpointing():
    """The program of the reports: LoRA in a small Llama, with gradients of the inputs."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    class Text(Blocks):
        def __init__(self):
            super().__init__(0)
            torch.manual_seed(0)
            config = transformers.LlamaConfig(
                vocab_size=80,
                hidden_size=32,
                num_hidden_layers=6,
                num_attention_heads=2,
                num_key_value_heads=2,
                intermediate_size=64,
                num_labels=3,
                pad_token_id=0,
                use_cache=False,
            )
            net = transformers.LlamaForSequenceClassification(config)
            net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            net.enable_input_require_grads()
            lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
            self.net = peft.get_peft_model(net, lora)
            self.net.train()

        def training_step(self, batch, _):
            output = self.net(input_ids=batch[0], attention_mask=torch.ones_like(batch[0]), labels=batch[1])
            graphs.append(nodes_of(output.loss))
            return output.loss

    def nodes_of(loss):
        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                waiting.extend(upstream for upstream, _ in node.next_functions)
        return len(seen)

    graphs = []
    data = vectors(32)
    inputs, labels = data.dataset.tensors
    ids = torch.utils.data.TensorDataset((inputs * 10).long().abs() + 1, labels)
    run(Text(), scripted({2: 3}), data=torch.utils.data.DataLoader(ids, 8), epochs=1)
    assert graphs[2] < graphs[0] * 0.7
