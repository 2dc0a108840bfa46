"""The tests of this project are collected once and run in forked processes, a file at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = """
import os, signal, time, warnings, pathlib
import pytest
here = pathlib.Path(__file__).parent
def say(file, words):
    with open(here / file, "a") as out:
        out.write(words + "\\n")
say("collected", __name__)
@pytest.fixture(scope="session")
def lab():
    yield
    say("down", str(os.getpid()))
"""
FILES = {
    "test_a.py": """
def test_first(lab, tmp_path): say("a", str(os.getpid())); warnings.warn("an odd word")
def test_second(lab): say("a", str(os.getpid())); print("seen by nobody")
def test_fails(lab): print("what it printed"); assert 1 == 2
""",
    "test_b.py": """
def test_before(lab): say("b", str(os.getpid()))
def test_dies(): os._exit(3)
def test_is_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(lab): say("b", str(os.getpid()))
""",
    "test_c.py": """
@pytest.mark.parametrize("n", range(3))
def test_skips_and_passes(n): n or pytest.skip("not the first")
""",
}


def command(folder: Path, *options: str) -> tuple[list[str], dict[str, str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    (folder / "lane_options.py").write_text("from tests.lanes import add_option as pytest_addoption, configure as pytest_configure")
    line = [sys.executable, "-m", "pytest", "-p", "lane_options", "--rootdir", str(folder), "-c", "/dev/null", *options, str(folder)]
    return line, environment | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(HEAD + text)


def test_every_test_runs_once_and_its_words_come_back(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    line, environment = command(tmp_path, "--lanes", "2", "-v")
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60)
    assert "3 failed, 6 passed, 1 skipped, 1 warning" in done.stdout, done.stdout + done.stderr
    assert "what it printed" in done.stdout and "assert 1 == 2" in done.stdout and "an odd word" in done.stdout
    assert "seen by nobody" not in done.stdout
    assert "the process that ran this test ended: exit code 3" in done.stdout
    assert "the process that ran this test ended: signal 9" in done.stdout
    assert done.returncode == 1
    assert sorted((tmp_path / "collected").read_text().split()) == ["test_a", "test_b", "test_c"]
    assert len(set((tmp_path / "a").read_text().split())) == 1  # a file stays together
    before, after = (tmp_path / "b").read_text().split()
    assert before != after  # its process died in between
    assert set((tmp_path / "down").read_text().split()) == {(tmp_path / "a").read_text().split()[0], after}


def test_what_shares_nothing_may_run_beside_its_own_file(tmp_path: Path) -> None:
    """Each of the two waits for the other: in one lane the first would wait in vain."""
    meet = """
@pytest.mark.{mark}
@pytest.mark.parametrize("own, other", [("1", "2"), ("2", "1")])
def test_meets(own, other):
    say(own, "here")
    end = time.monotonic() + {wait_s}
    while not (here / other).exists():
        assert time.monotonic() < end
        time.sleep(0.01)
"""
    for mark, wait_s, says in (("shares_nothing", 30, "2 passed"), ("together", 0.5, "1 failed, 1 passed")):
        folder = tmp_path / mark
        folder.mkdir()
        write(folder, {"test_a.py": meet.format(mark=mark, wait_s=wait_s)})
        line, environment = command(folder, "--lanes", "2")
        done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60)
        assert says in done.stdout, done.stdout + done.stderr


def test_the_first_failure_can_end_it(tmp_path: Path) -> None:
    write(tmp_path, {"test_a.py": FILES["test_a.py"], "test_d.py": "def test_never(): say('never', 'it ran')"})
    line, environment = command(tmp_path, "--lanes", "1", "-x")
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60)
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "never").exists() and (tmp_path / "down").exists()


def test_control_c_takes_every_lab_down(tmp_path: Path) -> None:
    write(tmp_path, {f"test_{name}.py": "def test_waits(lab): say('waits', str(os.getpid())); time.sleep(60)" for name in "ab"})
    line, environment = command(tmp_path, "--lanes", "2")
    running = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    end = time.monotonic() + 60
    while not (tmp_path / "waits").exists() or len((tmp_path / "waits").read_text().splitlines()) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    output, _ = running.communicate(timeout=60)
    assert "KeyboardInterrupt" in output and running.returncode == 2
    assert sorted((tmp_path / "down").read_text().split()) == sorted((tmp_path / "waits").read_text().split())


def test_trainings_are_for_half_of_the_lanes_while_others_have_something_to_do(tmp_path: Path) -> None:
    """The lanes that do not train wait until all trainings are done: if they were given one, it would be theirs."""
    trains = """
@pytest.fixture(scope="session")
def forks(): pass
def test_trains(forks): say("trained", str(os.getpid()))
"""
    waits = """
def test_waits():
    import time
    end = time.monotonic() + 20
    while len((here / "trained").read_text().split() if (here / "trained").exists() else []) < 8:
        assert time.monotonic() < end
        time.sleep(0.02)
    say("waited", str(os.getpid()))
"""
    write(tmp_path, {"test_a.py": trains, "test_b.py": trains, "test_c.py": waits, "test_d.py": waits})
    write(tmp_path, {f"test_e{number}.py": trains for number in range(6)} | {f"test_f{number}.py": waits for number in range(2)})
    line, environment = command(tmp_path, "--lanes", "4")
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    trained, waited = (set((tmp_path / name).read_text().split()) for name in ("trained", "waited"))
    assert len(trained) <= 2 and waited - trained, "two of four lanes have never trained"
