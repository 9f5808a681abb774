import subprocess
import sys

from lightning_egeria.programs.locks import held


def test_one_process_has_it(tmp_path):
    path = tmp_path / "lock"
    with held(path) as first, held(path) as second:
        assert (first, second) == (True, False)
    with held(path) as again:
        assert again


def test_it_ends_with_its_process(tmp_path):
    code = "import sys, time; from pathlib import Path; from lightning_egeria.programs.locks import held\n"
    code += "with held(Path(sys.argv[1])) as free: print(free, flush=True); time.sleep(60)"
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        with held(path) as free:
            assert not free
        process.kill()
        process.wait()
        with held(path) as free:
            assert free
