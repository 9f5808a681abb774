import pytest

from lightning_egeria.jobs.rules import broken_rules

TEN = list("0123456789")
COMMAND, EXPERIMENT = {"command": "x"}, {"experiment": "default"}


def broken(**keys):
    return [f"{key}: {message}" for key, message in broken_rules({"name": "a", "entry": COMMAND, **keys})]


def test_a_good_job_breaks_none():
    assert broken() == []
    assert broken(sweep=dict.fromkeys("ABC", TEN)) == []
    assert broken(sweep={"A": ["1", "2"]}, environment={"variables": {"B": "1"}}) == []
    assert broken(entry=EXPERIMENT, sweep={"optimizer.lr": ["1", "2"]}) == []
    assert broken(entry=EXPERIMENT, optimisations={"freezing": True, "cache": {"host_bytes": "1"}}) == []


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"entry": {}}, "entry: expected either experiment or command"),
        ({"entry": {**COMMAND, **EXPERIMENT}}, "entry: expected either experiment or command"),
        ({"entry": {"command": []}}, "entry.command: expected a list of texts"),
        ({"entry": {"command": " "}}, "entry.command: expected a list of texts"),
        ({"entry": {**COMMAND, "overrides": ["a=1"]}}, "entry.overrides: belongs to an experiment"),
        ({"entry": {**EXPERIMENT, "overrides": ["callbacks=none"]}}, "Use optimisations instead"),
        ({"entry": {**EXPERIMENT, "overrides": ["+run_dir=x"]}}, "run_dir is set by the job engine"),
        ({"entry": EXPERIMENT, "resources": {"nodes": 2}}, "resources.nodes: an experiment runs on one node"),
        ({"environment": {"requirements": "a", "lock": "b"}}, "a lock has the requirements already"),
        ({"environment": {"secrets": ["A"], "variables": {"A": "1"}}}, "environment.variables.A: is a secret too"),
        ({"optimisations": "atuo"}, "Did you mean"),
        ({"optimisations": "freezing"}, "got 'freezing'. Write {freezing: true}"),
        ({"optimisations": {"freezng": True}}, "optimisations.freezng: no such method. Did you mean 'freezing'?"),
        ({"optimisations": {"freezing": True}}, "a command takes no methods"),
        ({"entry": EXPERIMENT, "optimisations": {"cache": "yes"}}, "expected true, false or options, got 'yes'"),
        ({"entry": EXPERIMENT, "optimisations": {"goodput": True, "tuning": True}}, "cannot train in one run"),
        ({"sweep": {"A": []}}, "sweep.A: expected at least one value"),
        ({"sweep": {"A": ["1", "2", "1"]}}, "sweep.A: has '1' 2 times. Keep one"),
        (
            {"sweep": {"A": list("abcdefghijk"), "B": TEN, "C": TEN}},
            "sweep: has 1100 combinations, expected at most 1000",
        ),
        (
            {"sweep": {"EGERIA_CHECKPOINTS": ["/x"]}},
            "sweep.EGERIA_CHECKPOINTS: becomes an environment variable of the command. Write CHECKPOINTS, ",
        ),
        ({"sweep": {"optimizer.lr": ["1"]}}, "Write OPTIMIZER_LR, and read $OPTIMIZER_LR there"),
        ({"sweep": {"A": ["1"]}, "environment": {"variables": {"A": "2"}}}, "sweep.A: stands in environment.variables"),
        ({"sweep": {"A": ["1"]}, "environment": {"secrets": ["A"]}}, "sweep.A: stands in environment.secrets too"),
        ({"entry": EXPERIMENT, "sweep": {"+run_dir": ["x"]}}, "sweep.+run_dir: run_dir is set by the job engine"),
        ({"entry": EXPERIMENT, "sweep": {"hydra.run.dir": ["x"]}}, "hydra.run.dir is set by the job engine"),
        ({"data": {"a": {"path": "x", "stage": True}}}, "a copy is checked by its digest"),
        (
            {"resources": {"devices": 3, "most_devices": 2}},
            "most_devices: expected at least devices=3, got 2",
        ),
        (
            {"resources": {"nodes": 2, "most_devices": 2}},
            "most_devices: the number of devices changes on one",
        ),
        (
            {"entry": EXPERIMENT, "resources": {"most_devices": 2}},
            "most_devices: an experiment runs on a changed number",
        ),
        ({"slurm": {"extra": {"partition": "x"}}}, "slurm.extra.partition: use slurm.partition instead"),
        ({"slurm": {"extra": {"gres": "gpu:1"}}}, "slurm.extra.gres: use resources.devices instead"),
        ({"slurm": {"extra": {"wrap": "x"}}}, "slurm.extra.wrap: is set by the job engine. Leave it out"),
    ],
)
def test_each_rule(keys, expected):
    if expected == "Did you mean":
        expected = "expected auto, none, or a map of methods, got 'atuo'. Did you mean 'auto'?"
    (found,) = broken(**keys)
    assert expected in found
