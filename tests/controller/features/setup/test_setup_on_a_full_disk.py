"""The disk of a node becomes full at several moments of a setup: it says so, and completes at the next call when there is room again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.lab import Lab
from tests.controller.features.setup.test_on_a_lab import Bench
from tests.lab.conftest import namespaces_missing

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.thorough,
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(namespaces_missing()), reason=namespaces_missing() or "-"),
]
DISK = "560m"  # what the packages need, and little more


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Bench]:
    """A node whose home is a disk of its own."""
    Lab.up(tmp_path / "lab", nodes=1, backend="namespaces").down(keep_files=True)
    home = tmp_path / "lab/nodes/node1/home"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(home)], check=True)
    try:
        (home / "homelab").mkdir()
        with Lab.up(tmp_path / "lab", nodes=1, backend="namespaces") as lab:
            bench = Bench(lab, tmp_path)
            bench.requirements.write_text("numpy\npyarrow\n")
            yield bench
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


def fill(home: Path) -> None:
    """To the last byte."""
    with (home / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_no_room_from_the_start_is_named_before_anything_is_sent(small: Bench) -> None:
    fill(small.home)
    said = small.homelab("setup", "--requirements", str(small.requirements), code=1)
    assert "the disk is full" in said and "make room: " in said and "Traceback" not in said
    os.truncate(small.home / "filler", (small.home / "filler").stat().st_size - (100 << 20))
    said = small.homelab("setup", "--requirements", str(small.requirements), code=1)
    assert "the disk has" in said and "make room there" in said and "Traceback" not in said
    assert not (small.home / ".homelab/env").exists()
    (small.home / "filler").unlink()
    assert small.setup()["changed"]


@pytest.mark.parametrize("moment", ["wheels", "env"])
def test_a_disk_that_fills_up_meanwhile_ends_it_with_its_reason(small: Bench, moment: str) -> None:
    """`moment`: while files come, and while uv unpacks them."""
    watched = small.home / ".homelab" / ("setup/wheels" if moment == "wheels" else "env/lib")
    is_over = threading.Event()

    def filler() -> None:
        while not is_over.is_set():
            if watched.is_dir() and any(watched.iterdir()):
                fill(small.home)
                return
            time.sleep(0.001)

    thread = threading.Thread(target=filler)
    thread.start()
    words = [sys.executable, "-m", "homelab", "setup", "--requirements", str(small.requirements)]
    done = subprocess.run(words, env=small.environment, capture_output=True, text=True, timeout=200, check=False)
    is_over.set()
    thread.join()
    said = done.stdout + done.stderr
    assert done.returncode != 0 and (small.home / "filler").exists(), said
    assert ("No space left" in said or "disk" in said) and "Traceback" not in said and "fix:" in said, said
    os.unlink(small.home / "filler")
    assert small.setup()["changed"] and not small.setup()["changed"]
    assert small.on_node("~/.homelab/env/bin/python -c 'import numpy, pyarrow; print(numpy.ones(2).sum())'") == "2.0"
