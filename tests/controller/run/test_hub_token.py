"""The token that a command was given: known to it and to the `homelab` that it starts, and in no environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from homelab.controller.run import hub_token

pytestmark = pytest.mark.timeout(30)
TOKEN = "hf_PlantedPlantedPlanted42"
# Prints its value, what the system shows of its environment, and what a child of a child gets.
PROGRAM = """
import os, subprocess, sys
from homelab.controller.run import hub_token
hub_token.take(os.environ)
shown = open("/proc/self/environ").read()
print(hub_token.value(), hub_token.value() in shown, "A=kept" in shown, os.environ.get("HF_TOKEN"))
if len(sys.argv) > 1:
    with hub_token.lent(os.environ) as (environment, descriptors):
        command = "exec " + sys.executable + ' -c "$PROGRAM" ' + " ".join(sys.argv[2:])
        subprocess.run(["/bin/sh", "-c", command], env=environment, pass_fds=descriptors, check=True)
"""


def said(*generations: str, **given: str) -> list[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("HF_TOKEN", "HUGGING"))}
    environment = outside | {"PROGRAM": PROGRAM, "A": "kept"} | given
    done = subprocess.run([sys.executable, "-c", PROGRAM, *generations], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_it_leaves_the_environment_and_reaches_our_own_programs(name: str) -> None:
    assert said("child", "grandchild", **{name: f" {TOKEN}"}) == [f"{TOKEN} False True None"] * 3


def test_a_file_may_hold_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert said("child", HF_TOKEN_PATH=str(file)) == [f"{TOKEN} False True None"] * 2
    assert said("child", HF_TOKEN_PATH=str(file), HF_TOKEN="hf_the_planted_variable") == ["hf_the_planted_variable False True None"] * 2


def test_without_one(tmp_path: Path) -> None:
    for given in ({}, {"HF_TOKEN": " "}, {"HF_TOKEN_PATH": str(tmp_path / "missing")}, {"HF_TOKEN_PATH": str(tmp_path)}):
        assert hub_token.take(given) == "" and hub_token.to_send() == {}
        with hub_token.lent({"A": "1"}) as (environment, descriptors):
            assert (environment, descriptors) == ({"A": "1"}, ())
