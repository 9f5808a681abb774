"""What is trained for the proof, by which methods, and where a run's result is kept."""

import dataclasses
import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

# The plain run, the same made as short as ours takes, and ours with and without the cache.
SHORT = ("plain", "freezing", "cached", "shortened")
# Shares of the layer modules that are frozen from the first step on; the last one and what follows always learn.
FIXED = {"half": 0.5, "deep": 0.75, "probe": 1.0}
# A number of layer modules is frozen after the first step, or after a percentage of the run, with the cache or without:
# the grid of the best fixed depth.
FROZEN = re.compile(r"frozen(?P<depth>\d+)(_from(?P<percent>\d+))?(?P<cached>_cached)?")
# First the head alone, then everything (LP-FT); or one part more in each epoch, from the end (ULMFiT).
THAWING = ("lpft", "gradual")
FINE_TUNING = (*SHORT, *FIXED, *THAWING)
LITE0 = "{data}/checkpoints/tf_efficientnet_lite0.safetensors"
# As the runs that are kept of the small networks were made.
WITHOUT_TRIAL = "callbacks.freezing.policy.trial=false"
# The plain run made as short as one of these takes.
SHORTENED = {
    "shortened": ("freezing", "cached"),
    "shortened_selective": ("selective",),
    "partial shortened": ("partial",),
}
SELECTING = ("selective", "selective_stale", "random", "importance", "shortened_selective", "selective_freezing")
# Partial backprop, and beside it the plain run made as short, and the one with batches as small.
PARTIAL = ("partial", "partial shortened", "partial smaller")
# And the ways of others to decide what freezes when.
ALL = (*SHORT, *PARTIAL, "slope", "static", "linear", "freezeout", "autofreeze")


@dataclasses.dataclass(frozen=True)
class Workload:
    """An experiment of `conf/experiment/` as it is run for the proof.

    Attributes:
        metric: that is logged on the validation data; larger is better.
        paper: percent by which the paper says training becomes faster; None where it has no such workload.
        methods: what is compared.
        overrides: where the data are; ``{data}`` is the folder with all data sets, ``{size}`` that of the experiment.
        views: augmented views of each sample in the cache; 0 where nothing is random.
        selects: mode of Selective-Backprop; texts of other lengths do not wait for one another in a queue.
    """

    metric: str
    paper: float | None
    methods: tuple[str, ...]
    overrides: tuple[str, ...]
    views: int
    selects: str = "queue"


# One argument of ours at a time, as overrides of the configuration; the interval is a share of the run.
VARIATIONS = {
    "tolerance": ("1e-4", "1e-3", "3e-3"),
    "patience": ("2", "8"),
    "peer_tolerance": ("0.02", "0.05"),
    "unfreeze_on": ("never",),
    "evaluation_samples": ("16", "64"),
    "evaluations": ("25", "100"),
}
OF_THE_POLICY = ("tolerance", "patience", "peer_tolerance", "unfreeze_on")

WORKLOADS = {
    "cifar10_resnet20": Workload("val/acc", 23, (*ALL, *SELECTING), ("data.root={data}/cifar10",), views=4),
    "cifar10_resnet20_cosine": Workload("val/acc", None, SHORT, ("data.root={data}/cifar10",), views=4),
    "cifar10_resnet56": Workload("val/acc", 23, SHORT, ("data.root={data}/cifar10",), views=4),
    "cifar10_mobilenetv2": Workload("val/acc", 22, SHORT, ("data.root={data}/cifar10",), views=4),
    "imagenette_resnet50": Workload("val/acc", 28, SHORT, ("data.root={data}/imagenette",), views=4),
    "camvid_deeplabv3": Workload("val/miou", 21, SHORT, ("data.root={data}/camvid",), views=2),
    "multi30k_transformer": Workload("val/bleu", 43, SHORT, ("data.root={data}/multi30k",), views=0),
    "squad_bert": Workload(
        "val/f1",
        41,
        SHORT,
        ("data.root={data}/squad", "model.weights={data}/checkpoints/squad_bert_{size}.safetensors"),
        views=0,
    ),
    "trashnet_efficientnet": Workload(
        "val/acc",
        None,
        (*FINE_TUNING, "selective", "in_batch", "random", "importance", "selective_cached"),
        ("data.root={data}/trashnet", f"model.weights={LITE0}"),
        views=0,
    ),
    "trashnet_efficientnet_augmented": Workload(
        "val/acc", None, SHORT, ("data.root={data}/trashnet", f"model.weights={LITE0}"), views=3
    ),
    "cifar10_efficientnet": Workload(
        "val/acc",
        None,
        FINE_TUNING,
        ("data.root={data}/cifar10", f"model.weights={LITE0}"),
        views=0,
    ),
    "camvid_efficientnet": Workload(
        "val/miou",
        None,
        FINE_TUNING,
        ("data.root={data}/camvid", f"model.net.weights={LITE0}"),
        views=0,
    ),
    "banking77_minilm": Workload(
        "val/acc",
        None,
        (*FINE_TUNING, "selective", "random", "shortened_selective", "selective_cached"),
        (
            "data.root={data}/banking77",
            "data.vocabulary={data}/checkpoints/all_minilm_l6_v2_vocab.txt",
            "model.weights={data}/checkpoints/all_minilm_l6_v2_int8.safetensors",
        ),
        views=0,
        selects="in_batch",
    ),
    "newsgroups_minilm": Workload(
        "val/acc",
        None,
        FINE_TUNING,
        (
            "data.root={data}/newsgroups",
            "data.vocabulary={data}/checkpoints/all_minilm_l6_v2_vocab.txt",
            "model.weights={data}/checkpoints/all_minilm_l6_v2_int8.safetensors",
        ),
        views=0,
    ),
    "imagenette_efficientnet": Workload(
        "val/acc",
        None,
        FINE_TUNING,
        ("data.root={data}/imagenette", f"model.weights={LITE0}"),
        views=0,
    ),
    "finetune_imagenette_resnet20": Workload(
        "val/acc",
        None,
        (*ALL, *SELECTING),
        (
            "data.root={data}/imagenette",
            "model.weights={data}/checkpoints/resnet20_cifar10.safetensors",
            WITHOUT_TRIAL,
        ),
        views=0,
    ),
    "finetune_imagenette_resnet56": Workload(
        "val/acc",
        None,
        SHORT,
        (
            "data.root={data}/imagenette",
            "model.weights={data}/checkpoints/resnet56_cifar10.safetensors",
            WITHOUT_TRIAL,
        ),
        views=0,
    ),
}


def result_path(workload: str, size: str, method: str, seed: int) -> Path:
    """Of one run."""
    return RESULTS / workload / size / f"{method}-{seed}.json"


def keep(path: Path, text: str) -> None:
    """Write a result, whole or not at all, in a folder that need not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text)
    unfinished.replace(path)


if __name__ == "__main__":
    print("\n".join(WORKLOADS))
