"""What is folded in a log, and that nothing which names an error is."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from homelab.controller.dashboard.log_noise import without_noise

SAMPLES = tomllib.loads((Path(__file__).parents[1] / "diagnose" / "samples.toml").read_text(encoding="utf-8"))
HOSTNAME = "[W1126 01:59:16.328846818 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
THREADS = "W1126 01:58:40.136000 62 torch/distributed/run.py:852] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default"
STARS = "W1126 01:58:40.136000 62 torch/distributed/run.py:852] *****************************************"
SOURCE = "  return func(*args, **kwargs)"
FUTURE = (
    "/home/me/.homelab/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py:83: FutureWarning: `all_gather` is deprecated."
)
USER = "/home/me/train.py:7: UserWarning: the learning rate is high"
ONE = "(1 warning of torch and its libraries, without an error)"


def test_the_chatter_of_torch_is_one_line_with_its_count() -> None:
    assert without_noise(["begin", HOSTNAME, STARS, THREADS, STARS, FUTURE, SOURCE, "end"]) == [
        "begin", "(5 warnings of torch and its libraries, without an error)", "end",
    ]  # fmt: skip
    assert without_noise(["begin", THREADS, "middle", STARS]) == [
        "begin",
        "(2 warnings of torch and its libraries, without an error)",
        "middle",
    ]


def test_one_line_alone_stays_where_it_is_no_gain() -> None:
    assert without_noise([FUTURE, SOURCE, "end"]) == [FUTURE, SOURCE, "end"]
    assert without_noise([FUTURE, SOURCE, "end"], least=1) == [ONE, "end"]


def test_a_warning_that_repeats_stands_once_with_its_count() -> None:
    lines = [USER, "  x = 1", "step 1", USER, "  x = 1", "step 2", USER, "  x = 1"]
    assert without_noise(lines) == [f"{USER} (x3)", "  x = 1", "step 1", "step 2"]
    assert without_noise([USER, "step 1"]) == [USER, "step 1"]
    assert without_noise(["step 1", "step 1"]) == ["step 1", "step 1"], "only warnings"


@pytest.mark.parametrize(
    "line",
    [
        "[W1126 01:59:16.3 socket.cpp:663] [c10d] The client socket has failed to connect to [node2]:29500 (errno: 113 - No route to host).",
        "W1126 01:58:40.136000 62 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 69 closing signal SIGTERM",
        "E1126 01:58:40.136000 62 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0",
        "/home/me/a.py:7: FutureWarning: this will be an error in the next version",
        "/home/me/a.py:7: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).",
    ],
)
def test_what_names_an_error_stays_as_often_as_it_was_said(line: str) -> None:
    assert without_noise([line, HOSTNAME, line, THREADS, line], least=1).count(line) == 3


def test_no_line_that_a_diagnosis_knows_is_folded() -> None:
    said = [line for rule in SAMPLES.values() for text in rule["lines"] for line in text.strip("\n").split("\n")]
    assert len(said) > 200
    assert [line for line in said if without_noise([line, line, THREADS, STARS], least=1).count(line) != 2 and line.strip()] == []
    assert without_noise([THREADS, THREADS, STARS], least=1).count(THREADS) == 0, "the control"
