"""`homelab tensorboard` serves a run's curves on loopback."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from homelab.controller.base import package
from homelab.controller.base.errors import HomelabError
from homelab.controller.features.track.tensorboard_server import TensorBoardServer

RUN = "2026-11-26-0158-demo"
RUNS = Path(__file__).parents[3] / "fixtures" / "older_runs" / "controller"


def test_a_package_that_is_missing_is_told_in_three_parts() -> None:
    with pytest.raises(HomelabError) as caught:
        package.require("no_such_tracker")
    assert "no_such_tracker is not installed on this machine" in caught.value.message
    assert sys.executable in caught.value.where and caught.value.hint.endswith("-m pip install no_such_tracker")
    package.require("tensorboard")


@pytest.mark.timeout(180)
def test_a_port_that_is_taken_is_told_in_three_parts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HomelabError, match=r"did not start: .*port") as caught:
            TensorBoardServer(tmp_path, port)
    assert caught.value.where == f"127.0.0.1:{port}" and "--port 0" in caught.value.hint


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_the_curves_are_served_on_loopback_until_ctrl_c(tmp_path: Path) -> None:
    shutil.copytree(RUNS / RUN, tmp_path / "runs" / RUN)
    lines = map(json.loads, (RUNS / RUN / "metrics.jsonl").read_text().splitlines())
    steps = sorted({line["step"] for line in lines if line["kind"] == "train"})
    (tmp_path / "cluster.toml").write_text('[[nodes]]\nname = "node1"\nhost = "127.0.0.1"\nport = 1\n')
    command = [sys.executable, "-m", "homelab", "tensorboard", RUN]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            title, address = process.stdout.readline(), process.stdout.readline().strip()
            assert title == f"{RUN}: {len(steps)} steps, done\n" and address.startswith("http://127.0.0.1:")
            tags = json.load(urllib.request.urlopen(f"{address}data/plugin/scalars/tags"))
            assert "train/loss" in tags[RUN]
            points = json.load(urllib.request.urlopen(f"{address}data/plugin/scalars/scalars?run={RUN}&tag=train%2Floss"))
            assert [step for _, step, _ in points] == steps
        finally:
            process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.count("Traceback")) == (0, 0), errors
    assert f"Next: homelab status {RUN}" in said
    with pytest.raises(OSError):
        urllib.request.urlopen(address, timeout=5)
