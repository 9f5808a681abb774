"""Records of runs, as a test needs them."""

from lightning_egeria.freezing.savings import Savings
from lightning_egeria.report.record import CachePoint, EvaluationPoint, MetricPoint, RunRecord, StepTimes


def run(name, speed=1.0, frozen_at=None, accuracies=(0.5, 0.7, 0.8)):
    record = RunRecord(name, about={"torch": "2.x"})
    for step in range(1, 31):
        depth = 2 if frozen_at is not None and step > frozen_at else 0
        record.add_step(StepTimes(step, 1, depth, 0.001, 0.01 * speed, 0.0 if depth else 0.02, 0.004, 0.001))
    record.metrics = [MetricPoint(10 * (i + 1), 10 * speed * (i + 1), {"val/acc": a}) for i, a in enumerate(accuracies)]
    if frozen_at is not None:
        record.layer_modules = ["net.<stem>", "net.{a}", "net.b"]
        record.events = [{"step": frozen_at, "kind": "freeze", "depth": 2, "reason": "slope < threshold"}]
        record.evaluations = [
            EvaluationPoint(s, [1e-3 / s, 2e-3 / s, 3e-3], [None, 1e-4, -1e-4]) for s in range(2, 12, 2)
        ]
        record.cache = [CachePoint(10, 0, 0, 5, 100), CachePoint(30, 50, 10, 20, 5000)]
        record.savings = Savings((), 2, 0.036, 0.016, 0.1, 3.0, 5, 0, 0, "float32", 100, 200)
    return record
