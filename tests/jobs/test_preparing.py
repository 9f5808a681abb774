import pytest

from lightning_egeria.cli.methods import CONFIGURABLE
from lightning_egeria.errors import ExecutionError
from lightning_egeria.jobs.jobfolders import Status
from lightning_egeria.jobs.preparing import command_for, data_for, variables_for, work_for
from lightning_egeria.jobs.rundirs import digest_of, read_run_directory
from support.jobs.described import described, folder_of


def prepared(tmp_path, **keys):
    description = described(tmp_path, **keys)
    folder = folder_of(tmp_path, description)
    (run,) = (tmp_path / "home" / "runs").iterdir()
    return folder, read_run_directory(run), run


def test_commands(tmp_path):
    folder, job, _ = prepared(tmp_path, **{"entry.command": "[python, train.py, a b]"})
    assert command_for(job, folder, "/x/python", 1) == ["/x/python", "train.py", "a b"]
    job["entry"]["command"] = "python train.py; $X"
    assert command_for(job, folder, "/x/python", 1) == ["/bin/sh", "-c", "python train.py; $X"]
    job["entry"] |= {"experiment": "default", "overrides": ["a=1"], "command": None}
    command = command_for(job, folder, "/x/python", 1)
    assert command[1:4] == ["-m", "lightning_egeria.cli.train", "a=1"]
    assert command[-2:] == [f"+callbacks.telling.hints='{folder.hints}'", f"run_dir='{folder.results}'"]
    (folder.checkpoints / "last.ckpt").touch()
    assert command_for(job, folder, "/x/python", 1)[-1] == f"ckpt_path='{folder.checkpoints}/last.ckpt'"


def test_an_experiment_is_told_the_devices_that_it_has_now(tmp_path):
    folder, job, _ = prepared(tmp_path, **{"resources.most_devices": 4})
    job["entry"] |= {"experiment": "default", "command": None}
    assert "trainer.devices=3" in command_for(job, folder, "python", 3)
    job["methods"] = {"goodput": {}}
    assert command_for(job, folder, "python", 3)[-1] == f"goodput.hints='{folder.hints}'"


def test_data_are_staged_and_checked(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1").write_text("x")
    digest = digest_of(tmp_path / "images")
    data = f"{{images: {{path: images, digest: '{digest}', stage: true}}, other: {{path: images}}}}"
    folder, job, _ = prepared(tmp_path, data=data)
    paths = data_for(job, tmp_path, folder)
    assert paths == {"EGERIA_DATA_IMAGES": str(folder.data / "images"), "EGERIA_DATA_OTHER": str(tmp_path / "images")}
    (folder.data / "images" / "1").write_text("y")
    with pytest.raises(ExecutionError, match=r"data\.images: the copy of .* has the digest"):
        data_for(job, tmp_path, folder)
    with pytest.raises(ExecutionError, match="does not exist on this machine"):
        data_for(job, tmp_path / "elsewhere", folder)
    job["data"]["images"]["stage"] = False
    (tmp_path / "images" / "1").write_text("z")  # since it was compiled
    with pytest.raises(ExecutionError, match=r"data\.images: .*images has the digest .* expected"):
        data_for(job, tmp_path, folder)


def test_files_of_the_job_may_change_where_it_works(tmp_path):
    (tmp_path / "train.py").write_text("1")
    folder, _, run = prepared(tmp_path, **{"entry.files": "[train.py]"})
    work_for(run, folder)
    (folder.work / "train.py").write_text("2")  # not read-only, and not the run directory's
    work_for(run, folder)
    assert (folder.work / "train.py").read_text() == "2"
    assert (run / "code" / "train.py").read_text() == "1"


def test_variables(tmp_path, monkeypatch):
    folder, job, _ = prepared(tmp_path, **{"environment.variables": "{A: '1'}"})
    monkeypatch.setenv("SLURM_NTASKS", "1")
    status = Status(attempt=2, devices=3)
    variables = variables_for(job, folder, status, {"EGERIA_DATA_X": "/x"})
    assert [variables[name] for name in ("A", "EGERIA_ATTEMPT", "EGERIA_DATA_X", "SLURM_NTASKS")] == [
        "1",
        "2",
        "/x",
        "1",
    ]
    assert variables["EGERIA_JOB_DEVICES"] == "3"
    assert variables["EGERIA_HINTS"] == str(folder.hints)
    job["entry"]["experiment"] = "default"
    variables = variables_for(job, folder, status, {})
    assert "SLURM_NTASKS" not in variables
    assert variables["EGERIA_METHODS"].startswith(f"{', '.join(CONFIGURABLE)}: off: a command takes no methods")
