"""The loss of each sample is that of the sample alone, and what does not fit is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_egeria.errors import PerSampleLossError
from lightning_egeria.methods.selecting.per_sample_loss import per_sample_losses

SAMPLES = 6
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
X = torch.randn(SAMPLES, 4)
Y = torch.tensor([0, 1, 2, 0, 1, 1])
ZEROS = torch.zeros(SAMPLES, 3)


def halves(x, y):
    loss = 0.5 * F.cross_entropy(NET(x), y)
    loss += F.mse_loss(NET(x), torch.zeros(len(x), 3)) / 4
    return loss


FIT = {
    "function": lambda x, y: F.cross_entropy(NET(x), y),
    "module": lambda x, y: nn.CrossEntropyLoss()(NET(x), y),
    "label smoothing": lambda x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(NET(x), y),
    "several dimensions": lambda x, y: F.mse_loss(NET(x), torch.zeros(len(x), 3)),
    "positional": lambda x, y: F.l1_loss(NET(x), torch.zeros(len(x), 3), None, None, "mean"),
    "mapping": lambda x, y: {"loss": F.huber_loss(NET(x), torch.zeros(len(x), 3)), "other": [x]},
    "two losses": lambda x, y: F.cross_entropy(NET(x), y) + 0.1 * F.mse_loss(NET(x), torch.zeros(len(x), 3)),
    "in place": halves,
    "stacked": lambda x, y: torch.stack([F.cross_entropy(NET(x), y), F.l1_loss(NET(x), 0 * NET(x))]).sum(),
    "difference": lambda x, y: F.cross_entropy(NET(x), y) - F.mse_loss(NET(x), torch.ones(len(x), 3)),
    "nll": lambda x, y: F.nll_loss(F.log_softmax(NET(x), 1), y),
    "divergence": lambda x, y: F.kl_div(F.log_softmax(NET(x), 1), torch.eye(3)[y], reduction="batchmean"),
    "margin": lambda x, y: F.multi_margin_loss(NET(x), y),
    "variance": lambda x, y: F.gaussian_nll_loss(NET(x), torch.zeros(len(x), 3), NET(x).exp()),
    "another shape logged": lambda x, y: (F.mse_loss(x.flatten(), x.flatten()), F.cross_entropy(NET(x), y))[1],
    "binary": lambda x, y: nn.BCEWithLogitsLoss()(NET(x)[:, 0], (y > 0).float()),
}


def value(output):
    return output["loss"] if isinstance(output, dict) else output


@pytest.mark.parametrize("name", FIT)
def test_each_loss_is_that_of_the_sample_alone(name):
    alone = torch.stack([value(FIT[name](X[i : i + 1], Y[i : i + 1])) for i in range(SAMPLES)])
    losses = per_sample_losses(lambda: FIT[name](X, Y), SAMPLES)
    torch.testing.assert_close(losses, alone.detach())
    assert not losses.requires_grad
    assert losses.std() > 0.01  # else any pairing would do


def test_sums_are_summed():
    losses = per_sample_losses(lambda: F.cross_entropy(NET(X), Y, reduction="sum"), SAMPLES)
    torch.testing.assert_close(losses, F.cross_entropy(NET(X), Y, reduction="none").detach())


def test_a_sum_beside_a_mean_counts_as_in_the_returned_loss():
    def step():
        return F.cross_entropy(NET(X), Y) + F.mse_loss(NET(X), ZEROS, reduction="sum") / 8

    losses = per_sample_losses(step, SAMPLES)
    torch.testing.assert_close(losses.mean(), step().detach())
    squares = F.mse_loss(NET(X), ZEROS, reduction="none").sum(1) * SAMPLES / 8
    torch.testing.assert_close(losses, (F.cross_entropy(NET(X), Y, reduction="none") + squares).detach())


def ignoring(x, y):
    return F.cross_entropy(NET(x), y.masked_fill(y == 2, -100))


REFUSED = {
    "class weights": lambda: F.cross_entropy(NET(X), Y, weight=torch.tensor([1.0, 2, 3])),
    "ignored targets": lambda: ignoring(X, Y),
    "mask": lambda: (F.cross_entropy(NET(X), Y, reduction="none") * (Y > 0)).mean(),
    "by hand": lambda: NET(X).square().mean(),
    "partly by hand": lambda: F.cross_entropy(NET(X), Y) + NET[0].weight.square().sum(),
    "detached": lambda: F.cross_entropy(NET(X), Y) + F.mse_loss(NET(X), ZEROS).detach(),
    "not linear": lambda: F.cross_entropy(NET(X), Y) ** 2,
    "number": lambda: torch.tensor(F.cross_entropy(NET(X), Y).item()),
    "flat tokens": lambda: F.mse_loss(NET(X).flatten(), ZEROS.flatten()),
    "deprecated argument": lambda: F.l1_loss(NET(X), ZEROS, size_average=False),
    "no loss": lambda: None,
    "values": lambda: F.cross_entropy(NET(X), Y, reduction="none"),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    with pytest.raises(PerSampleLossError, match="Compute the losses of the samples yourself"):
        per_sample_losses(REFUSED[name], SAMPLES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_low_precision_is_no_disagreement(dtype):
    losses = per_sample_losses(lambda: F.cross_entropy(NET(X).to(dtype), Y), SAMPLES)
    plain = F.cross_entropy(NET(X), Y, reduction="none").detach()
    torch.testing.assert_close(losses.float(), plain, atol=0.05, rtol=0.05)


def test_the_network_gets_no_gradient_and_draws_the_same():
    net, states = nn.Sequential(NET, nn.Dropout(0.5)), []
    for run in (lambda step: step(), lambda step: per_sample_losses(step, SAMPLES)):
        torch.manual_seed(1)
        run(lambda: F.cross_entropy(net(X), Y))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_nan_is_handed_on():
    losses = per_sample_losses(lambda: F.mse_loss(X[:, 0].log(), X[:, 1]), SAMPLES)
    assert torch.equal(losses.isnan(), X[:, 0] < 0)
