"""The small real model of the tests is made while they are collected: each takes one core for half a minute (measured, two cores)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_LIMIT_S = 300.0


class SmallModel:
    """A plugin of the process that collects. No test begins before the model is there."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "homelab.lab.model", os.environ["HOMELAB_MODEL"]]
        self._making = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def pytest_collection_finish(self) -> None:
        """Raises pytest.UsageError with the words of the conversion where it fails."""
        said = self._making.communicate(timeout=_LIMIT_S)[1]
        if self._making.returncode:
            raise pytest.UsageError(f"the small model of the tests could not be made:\n{said.strip()}")

    def pytest_unconfigure(self) -> None:
        """Where the collection has failed."""
        self._making.kill()
        self._making.wait()
