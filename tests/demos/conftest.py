"""Data sets of a few samples."""

import gzip

import pytest

from support.demos import PLACES, asked, squad


@pytest.fixture
def root(tmp_path):
    questions = [asked(name) for name in PLACES]
    (tmp_path / "train-v1.1.json").write_text(squad(*questions * 4, asked("Anna", start_source="first_occurrence")))
    (tmp_path / "my_dev.json.gz").write_bytes(gzip.compress(squad(*questions).encode()))
    return tmp_path
