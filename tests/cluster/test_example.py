"""The example workload: the same for one seed, and in the published format."""

from lightning_egeria.cluster.example import write_example
from lightning_egeria.cluster.workloads import read_workload


def test_one_seed_gives_one_workload(tmp_path):
    same = [write_example(tmp_path / name, jobs=5, seed=3).read_bytes() for name in "ab"]
    other = write_example(tmp_path / "c", jobs=5, seed=4).read_bytes()
    assert same[0] == same[1] != other


def test_jobs_arrive_at_the_rate_asked_for(tmp_path):
    workload = read_workload(write_example(tmp_path, jobs=400, seconds_between=30))
    assert len(workload) == 400
    assert 25 < workload[-1].time / 400 < 35
    assert {job.application for job in workload} == {"vision", "ranking"}
