"""Has atheris look for inputs that reach lines of a reader which no other has reached.

    pip install atheris
    PYTHONPATH=tests python -m fuzz.guided "fields of a sample" -max_total_time=60

Ends at the first input that is not read as it must be. What follows the name is for libFuzzer.
"""

import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Fuzz one format."""
    import atheris  # no requirement of the project

    with atheris.instrument_imports(include=["lightning_egeria", "json"]):
        from fuzz.formats import formats
    with tempfile.TemporaryDirectory() as folder:
        (tested,) = [known for known in formats(Path(folder)) if known.name == sys.argv[1]]
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(tested.seeds):
            (corpus / str(number)).write_bytes(seed)

        def read(data: bytes) -> None:
            tested.read(data)

        atheris.Setup([sys.argv[0], *sys.argv[2:], "-rss_limit_mb=4096", str(corpus)], read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
