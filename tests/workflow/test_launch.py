import json
import subprocess

from lightning_egeria.workflow.launch import ray_job, shell_script, slurm_options, slurm_script

JOB = {
    "name": "tune.0",
    "resources": {"nodes": 1, "devices": 2, "memory": "16GB", "time": "90s"},
    "checkpoints": {"grace": "2m"},
}
SHELL = """#!/bin/sh
# tune.0
set -eu
exec "${EGERIA_JOBS_PYTHON:-python3}" -P -m lightning_egeria.workflow.execution "${1:?the folder of the job}"
"""
SLURM = """#!/bin/sh
#SBATCH --job-name=tune.0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --mem=16000M
#SBATCH --time=2
set -u
status=0
srun --unbuffered "${EGERIA_JOBS_PYTHON:-python3}" -P -m lightning_egeria.workflow.execution \
"${1:?the folder of the job}" || status=$?
case $status in 75|137) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit $status
"""


def test_the_files_stay_as_they_are():
    assert shell_script(JOB) == SHELL
    assert slurm_script(JOB) == SLURM
    assert json.loads(ray_job(JOB)) == {
        "entrypoint": "${EGERIA_JOBS_PYTHON:-python3} -P -m lightning_egeria.workflow.execution {folder}",
        "entrypoint_num_cpus": 2,
        "entrypoint_memory": 16 * 10**9,
        "metadata": {"name": "tune.0"},
    }


def test_a_shell_reads_them(tmp_path):
    for text in (SHELL, SLURM):
        script = tmp_path / "script.sh"
        script.write_text(text)
        subprocess.run(["sh", "-n", script], check=True)
    failed = subprocess.run(["sh", script], capture_output=True, text=True, check=False)
    assert "the folder of the job" in failed.stderr


def test_limits_may_be_left_out():
    job = {**JOB, "resources": {"nodes": 1, "devices": 1, "memory": None, "time": None}}
    assert {"mem", "time"} & slurm_options(job).keys() == set()
    assert "entrypoint_memory" not in ray_job(job)
