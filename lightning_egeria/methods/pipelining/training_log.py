"""What a training step logged, and what it gave its metrics, in all processes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_egeria.methods.pipelining.messages import Processes, loaded, saved
from lightning_egeria.methods.pipelining.metric_calls import Call, MetricCalls
from lightning_egeria.methods.pipelining.strategy_support import check_logged
from lightning_egeria.methods.pipelining.training_step import Logged


def log_everywhere(
    module: pl.LightningModule, metrics: MetricCalls, logged: list[Logged], calls: list[list[Call]]
) -> None:
    """Log the mean of each number over the micro-batches and each metric of the batch. Every process must call it.

    Args:
        module: its `log` is called.
        metrics: its metrics.
        logged: what this process logged.
        calls: of metrics, for each micro-batch of this process.
    """
    processes = Processes()
    found = [(name, value, check_logged(name, given), samples) for name, value, given, samples in logged]
    each = processes.each([found, any(calls)])
    callers = [rank for rank, (_, called) in enumerate(each) if called]
    if callers:
        data = saved(calls)
        parts: list[list[list[Call]]] = [loaded(processes.data(data, rank), module.device) for rank in callers]
        # Devices of a stage take turns with the micro-batches.
        longest = max(map(len, parts))
        metrics.repeat([part[turn] for turn in range(longest) for part in parts if turn < len(part)])
    _log([entry for entries, _ in each for entry in entries], module)


def _log(entries: list[Logged], module: pl.LightningModule) -> None:
    named: dict[str, Any] = dict(module.named_modules())
    for name in dict.fromkeys(entry[0] for entry in entries):
        own = [entry for entry in entries if entry[0] == name]
        given, value = dict(own[-1][2]), own[-1][1]
        if isinstance(value, str):
            module.log(name, named[value], **given)
            continue
        samples = sum(entry[3] for entry in own)
        if given.get("batch_size") is not None:
            given["batch_size"] = sum(entry[2]["batch_size"] for entry in own)
        given["sync_dist"] = True  # it stays as it is; else Lightning warns
        module.log(name, sum(entry[1] * entry[3] for entry in own) / samples, **given)
