"""Numbers are averaged by samples, metrics are logged as they are; several processes are in `test_strategy.py`."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_egeria.methods.pipelining.metric_calls import MetricCalls
from lightning_egeria.methods.pipelining.training_log import log_everywhere


class Module(nn.Module):
    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.mean, self.found = MeanMetric(), {}

    def log(self, name, value, **given):
        self.found[name] = value, given


def test_it_logs_for_the_whole_batch():
    module = Module()
    logged = [
        ("loss", 1.0, {"prog_bar": True, "batch_size": 1}, 1),
        ("mean", "mean", {"on_step": True}, 1),
        ("loss", 4.0, {"prog_bar": True, "batch_size": 2}, 2),
    ]
    calls = [[("mean", "forward", (torch.tensor([1.0]),), {})], [("mean", "forward", (torch.tensor([4.0, 4.0]),), {})]]
    log_everywhere(module, MetricCalls(module), logged, calls)
    value, given = module.found["loss"]
    assert value == pytest.approx(3.0)
    assert given == {"prog_bar": True, "batch_size": 3, "sync_dist": True}
    assert module.found["mean"] == (module.mean, {"on_step": True})
    assert float(module.mean.compute()) == pytest.approx(3.0)
