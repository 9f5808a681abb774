"""Workloads: read as they were written, and refused with the line that is wrong."""

import pytest

from lightning_egeria.cluster.workloads import Submission, read_philly, read_workload, write_workload
from lightning_egeria.errors import TraceError

JOBS = [Submission("a", 0, "vision", 2, 128), Submission("b", 61, "ranking", 1, 64)]
HEADER = "name,time,application,num_replicas,batch_size\n"


def test_a_workload_is_read_as_written(tmp_path):
    write_workload(tmp_path / "workload.csv", JOBS)
    assert read_workload(tmp_path / "workload.csv") == JOBS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("", "at least one line"),
        (HEADER, "at least one line"),
        (HEADER + "a,0,vision,1,64\nb,0,vision,1,64\na,1,vision,1,64\n", "lines 2 and 4 .* named a"),
        (HEADER + "a,0,vision,1,64\nb,soon,vision,1,64\n", "line 3 .*: time is 'soon', expected a whole number from 0"),
        (HEADER + "a,-1,vision,1,64\n", "line 2 .*: time is '-1', expected"),
        (HEADER + f"a,{10**11},vision,1,64\n", "line 2 .*: time is '1000"),
        (HEADER + "a,0,vision,0,64\n", "line 2 .*: num_replicas is '0', expected a whole number from 1"),
        (HEADER + "a,0,vision,1,0\n", "line 2 .*: batch_size is '0'"),
        (HEADER + ",0,vision,1,64\n", "line 2 .* no name"),
        (HEADER + "a,0,vision\n", "line 2 .* 3 fields"),
        (HEADER + "a,0,vision,1,64,9\n", "line 2 .* 6 fields"),
        ("name,time\na,0\n", "0 columns named application"),
    ],
)
def test_a_damaged_workload_is_refused(tmp_path, text, message):
    path = tmp_path / "workload.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_workload(path)


def test_the_philly_trace_is_read_in_order(tmp_path):
    path = tmp_path / "philly.csv"
    path.write_text("timestamp,duration,num_gpus\n2017-10-09 07:01:55,66.0,1\n2017-10-09 07:00:55,90.0,8\n")
    assert read_philly(path) == [(0.0, 90.0, 8), (60.0, 66.0, 1)]
    path.write_text("timestamp,duration\n2017-10-09 07:01:55,66.0\n")
    with pytest.raises(TraceError, match="not a Philly trace"):
        read_philly(path)
