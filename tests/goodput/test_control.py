"""What a job knows, without a Trainer."""

import json

import pytest

from lightning_egeria.cluster.goodput import BatchLimits
from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.goodput.control import BatchSizeControl
from lightning_egeria.methods.goodput.decision import Division, LargestGoodput, ScriptedBatchSizes
from lightning_egeria.methods.goodput.profile import Configuration


def control(largest=256, rule=None, local=(8, None), groups=1):
    return BatchSizeControl(16, largest, local, rule or LargestGoodput(), 10, groups)


@pytest.fixture
def informed():
    job = control()
    job.noise.add([101.0], [51.0], 2, 2.0)  # |G|^2 = 1, tr(S) / M0 = 100
    for local in (16, 32):
        job.profile.add(Configuration(1, 1, local, 0), 0.1 + 0.0001 * local, stepped=True)
    return job


def test_goodput_is_known_when_noise_and_times_are(informed):
    assert control().goodput(1) is None
    assert control().next(10, Division(16, 1, 1)) is None
    assert control().estimate(Division(16, 1, 1)) is None
    goodput = informed.goodput(1)
    assert (goodput.squared_norm, goodput.variance) == (1.0, 100.0)
    assert informed.estimate(Division(16, 1, 1)).efficiency == 1.0
    assert informed.estimate(Division(16, 1, 1)).throughput == pytest.approx(16 / 0.1016, rel=0.05)
    assert informed.next(10, Division(16, 1, 1)).total > 64


def test_it_decides_each_so_many_steps(informed):
    assert not informed.decides(9)
    assert informed.decides(10)
    informed.wait(10)
    assert not informed.decides(19)
    assert informed.decides(20)
    assert not control(largest=16).decides(100)
    scripted = control(rule=ScriptedBatchSizes({3: 64}, 64))
    assert scripted.decides(1)
    assert scripted.decides_alike
    assert scripted.next(3, Division(16, 1, 2)) == Division(32, 1, 2)


def test_one_gradient_a_step_is_repeated_in_halves(informed):
    def repeated(now, steps):
        return {step: stands_for for step in steps if (stands_for := informed.repeats(step, now))}

    often = dict.fromkeys(range(2, 32, 2), 2)
    for size in (16, 32):
        assert repeated(Division(size, 1, 1), range(200)) == often | {64: 64, 128: 64, 192: 64}
    for other in (Division(16, 2, 1), Division(16, 1, 2), Division(1, 1, 1)):  # accumulated, of two processes
        assert repeated(other, range(100)) == {}
    informed.changed(110, Division(32, 1, 1), "")
    assert repeated(Division(32, 1, 1), range(110, 200)) == dict.fromkeys(range(110, 142, 2), 2) | {192: 64}
    informed.forget(150)
    assert repeated(Division(32, 1, 1), range(150, 152)) == {150: 2}
    assert informed.limits(1).fewest_batches == 1
    informed.halves = False
    assert repeated(Division(32, 1, 1), range(150, 200)) == {}
    assert informed.limits(1).fewest_batches == 2
    again = control()
    again.load(informed.state())
    assert again.state() == informed.state()
    assert control(largest=16).repeats(0, Division(16, 1, 1)) == 0


def test_what_did_not_fit_is_a_limit(informed):
    assert informed.limits(2) == BatchLimits(16, 256, 8, 128, 1)
    informed.out_of_memory = 40
    assert informed.limits(2).largest_local == 39
    assert informed.next(10, Division(16, 1, 1)).local <= 39
    assert informed.divided(256, 2) == Division(32, 4, 2)
    with pytest.raises(ArgumentError, match="max_batch_size must be at least"):
        control(largest=64).limits(16)


def test_a_job_tells_a_scheduler(informed):
    hints = informed.hints(1)
    assert (hints.profiled, hints.progress, hints.variance) == (1, 0.0, 100.0)
    assert hints.unfrozen is None
    informed.depth = 2
    informed.profile.add(Configuration(1, 1, 16, 2), 0.05, stepped=True)
    frozen = informed.hints(1)
    assert float(frozen.throughput.gradient_seconds(16)) == pytest.approx(0.05, rel=0.05)
    assert float(frozen.unfrozen.gradient_seconds(16)) == pytest.approx(0.1016, rel=0.05)
    assert control().hints(1).goodput() is None


def test_the_state_is_all_of_it(informed):
    informed.changed(12, Division(32, 2, 1), "for this test")
    informed.progress.step(64, 2.5, "step")
    informed.out_of_memory, informed.depth = 40, 3
    informed.wait(30)
    again = BatchSizeControl(999, 1024, (8, None), LargestGoodput(), 10, 1)
    again.load(json.loads(json.dumps(informed.state())))
    assert again.state() == informed.state()
    assert again.initial == 16
    assert again.changes[0].batch_size == 64
    with pytest.raises(ValueError, match="1 parameter groups, expected 2"):
        control(groups=2).load(informed.state())
