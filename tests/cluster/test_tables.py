"""Tables: each number in the domain of its column, or a message with the line."""

import os
import tracemalloc

import pytest

from lightning_egeria.cluster.tables import read_rows, read_table
from lightning_egeria.errors import TraceError

PLACEMENTS = ("placement", "local_bsz", "step_time", "sync_time")
SCALABILITY = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
VALIDATION = ("progress", "iteration", "metric", "grad_sqr", "grad_var")


def written(path, columns, *rows):
    path.write_text("\n".join([",".join(columns), *rows]))
    return path


def test_other_columns_and_empty_lines_are_passed_over(tmp_path):
    path = written(tmp_path / "a.csv", ("note", *PLACEMENTS), "x,31,16,0.5,0.25", "", "y,4,32,1,0")
    table = read_table(path, PLACEMENTS)
    assert {name: values.tolist() for name, values in table.items()} == {
        "placement": [13, 4],
        "local_bsz": [16, 32],
        "step_time": [0.5, 1],
        "sync_time": [0.25, 0],
    }
    assert [line for line, _ in read_rows(path, ["note"])] == [2, 4]


@pytest.mark.parametrize(
    ("columns", "sound", "wrong"),
    [
        (PLACEMENTS, "1,16,1,0", ["-1", "10", "1.5", "0", "", "1" * 16]),
        (SCALABILITY, "2,2,16,1,0", ["0", "-1", "1.5", "1e10", "nan"]),
        (SCALABILITY[1:] + SCALABILITY[:1], "2,16,1,0,2", ["1", "0", "2.5"]),
        (PLACEMENTS[1:] + PLACEMENTS[:1], "16,1,0,1", ["0", "-16", "0.5"]),
        (PLACEMENTS[2:], "1,0.5", ["0", "-1", "0.5", "inf", "1e300", "1e-300"]),
        (PLACEMENTS[:1:-1], "0,1", ["-0.1", "1", "99", "nan"]),
        (VALIDATION, "1,1,1,1,1", ["0", "-1", "nan", "inf"]),
        (VALIDATION[1:], "1,1,1,1", ["0", "-1", "nan", "1e300"]),
        (VALIDATION[2:], "1,1,1", ["nan", "inf", "text"]),
        (VALIDATION[3:], "0,1", ["-1", "nan", "1e300"]),
        (VALIDATION[4:], "1", ["0", "-1", "5e-324", "nan"]),
    ],
)
def test_each_column_has_its_domain(tmp_path, columns, sound, wrong):
    path = tmp_path / "a.csv"
    read_table(written(path, columns, sound), columns)
    _, comma, rest = sound.partition(",")
    for value in wrong:
        with pytest.raises(TraceError, match=f"line 2 of .*: (sync_time|num_replicas|{columns[0]}) is .*, expected"):
            read_table(written(path, columns, value + comma + rest), columns)


@pytest.mark.parametrize("rows", [("2,2,1,1,1", "2,3,1,1,1"), ("2,3,1,1,1", "3,2,1,1,1"), ("2,2,1,1,1", "1,1,1,1,1")])
def test_progress_and_iterations_rise(tmp_path, rows):
    with pytest.raises(TraceError, match=r"line 3 .* larger than in the line before"):
        read_table(written(tmp_path / "a.csv", VALIDATION, *rows), VALIDATION)


def test_no_two_lines_have_the_same_keys(tmp_path):
    path = written(tmp_path / "a.csv", PLACEMENTS, "13,16,1,0", "13,32,1,0", "31,16,2,0")
    with pytest.raises(TraceError, match=r"lines 2 and 4 .* have the same placement, local_bsz"):
        read_table(path, PLACEMENTS, keys=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        (b"", "has no lines"),
        (b"a\n", "has no lines"),
        (b"b\n1\n", "line 1 .* 0 columns named a"),
        (b"a,a\n1,2\n", "line 1 .* 2 columns named a"),
        (b"a,b\n1,2\n1,2,3\n", "line 3 .* 3 fields, expected 2"),
        (b"a,b\n1\n", "line 2 .* 1 fields, expected 2"),
        (b"a\n\xff\n", "cannot be read"),
        (b"a\n" + b"1" * 200_000, "cannot be read"),
    ],
)
def test_a_file_without_rows_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(TraceError, match=message):
        read_rows(tmp_path / "a.csv", ["a"])


@pytest.mark.parametrize("line", ["1,1,1,1\n", ",,,\n", '"","","",""\n'])
def test_a_table_takes_a_multiple_of_its_size(line, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("placement,local_bsz,step_time,sync_time\n" + line * 30_000)
    tracemalloc.start()
    try:
        with pytest.raises(TraceError):
            read_table(path, ("placement", "local_bsz", "step_time", "sync_time"), keys=2)
        assert tracemalloc.get_traced_memory()[1] < 150 * path.stat().st_size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["pipe", "zeros", "large"])
def test_a_table_is_an_ordinary_file_of_some_size(kind, tmp_path):
    path = tmp_path / "table.csv"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)
    with pytest.raises(TraceError, match=r"no ordinary file|larger than"):
        read_table(path, ("placement",))
