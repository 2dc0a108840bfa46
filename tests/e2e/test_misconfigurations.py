"""`homelab preflight` as a process, on a real lab in which one thing is wrong: preflight names it, the node, and the fix.

A fast choice; `scripts/bench preflight` tries every misconfiguration.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.config.load import load_recipe
from homelab.lab import Lab
from scripts.practice.desk import Desk
from scripts.practice.misconfigurations import catalogue, training_files
from scripts.practice.misconfigurations.misconfiguration import NotInjectable, node_for, peer_of
from tests.lab.conftest import namespaces_missing

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(120)]

QUICK = ("rendezvous-blocked", "key-refused", "damaged-code", "no-inodes", "other-data")
CHOICE = (
    *QUICK,
    *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ephemeral-in", "own-name-loopback", "other-peft", "battery")),
)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """Three nodes with nothing wrong."""
    if why := namespaces_missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("misconfigurations")
    with Lab.up(folder / "lab", nodes=3, backend="namespaces") as lab:
        yield Desk(folder, lab)


def alarms(desk: Desk, *options: str) -> list[dict[str, Any]]:
    """The warnings and failures of preflight."""
    findings = desk.json("preflight", *options, code=None)["findings"]
    return [finding for finding in findings if finding["level"] != "ok"]


def test_nothing_is_found_where_nothing_is_wrong(desk: Desk) -> None:
    """Also ships the code, which one of the misconfigurations damages."""
    assert alarms(desk) == []


@pytest.mark.parametrize("name", CHOICE)
def test_it_is_found_and_undone(name: str, desk: Desk) -> None:
    misconfiguration = catalogue.find(name)
    node = node_for(misconfiguration, desk.lab)
    recipe = [str(training_files.place(desk.lab))] if "recipe" in misconfiguration.needs else []
    try:
        with catalogue.injected(desk.lab, node, misconfiguration):
            started = time.monotonic()
            found = alarms(desk, *recipe, *of_the_model(misconfiguration.checks), *(["--deep"] if "deep" in misconfiguration.needs else []))
            seconds = time.monotonic() - started
    except NotInjectable as error:
        # With all the programs that inject faults, each of these is injected: a skip once hid that a file had moved.
        assert name not in QUICK or not os.environ.get("HOMELAB_FLAWS"), error
        pytest.skip(str(error))
    ours = [finding for finding in found if finding["check"] in misconfiguration.checks]
    assert ours, found
    assert all(finding["hint"] or finding["fix"] for finding in ours), ours
    places = {node, "", *([peer_of(desk.lab, node)] if misconfiguration.where == "pair" else [])}
    assert {finding["node"] for finding in found} <= places, found
    assert seconds < 60.0, "2 to 5 s on an idle machine; preflight does not wait for each time-out in turn"


def test_nothing_is_left(desk: Desk) -> None:
    """The nodes are healthy again, with the recipe too."""
    recipe = training_files.place(desk.lab)
    assert alarms(desk, str(recipe), *of_the_model(())) == []


def of_the_model(checks: tuple[str, ...]) -> list[str]:
    """The options that spare a node to build the model, where no check of it is to find something."""
    return [] if any(check.startswith("model.") for check in checks) else ["--skip", "model"]


def test_practice_recipe_is_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(training_files.RECIPE)
    recipe = load_recipe(file)
    assert recipe.model and recipe.model.name == f"~/{training_files.MODEL_FOLDER}"
