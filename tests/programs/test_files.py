import os

import pytest

from lightning_egeria.programs.files import read_at_most


def test_what_is_no_small_ordinary_file_is_refused(tmp_path):
    path, pipe = tmp_path / "file", tmp_path / "pipe"
    path.write_bytes(b"12345")
    assert read_at_most(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_at_most(path, 4)
    os.mkfifo(pipe)
    for odd in (pipe, "/dev/zero", tmp_path):
        with pytest.raises(OSError, match=r"no ordinary file|Is a directory"):
            read_at_most(odd, 10)
    with pytest.raises(FileNotFoundError):
        read_at_most(tmp_path / "missing", 10)
