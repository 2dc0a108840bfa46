"""`homelab preflight` as a process, on a real lab in which one thing is wrong: it says so, on the right node, and how to mend it.

A fast choice; `scripts/bench preflight` tries every flaw.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.config.load import load_recipe
from homelab.lab import Lab
from homelab.lab.flaws import catalogue, material
from homelab.lab.flaws.trial import Trials, preflight
from tests.lab.conftest import namespaces_missing

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(120)]

QUICK = ("rendezvous-blocked", "key-refused", "damaged-code", "no-inodes", "other-data")
CHOICE = (*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ephemeral-in", "own-name-loopback", "other-peft", "battery")))


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """Three nodes with nothing wrong."""
    if why := namespaces_missing():
        pytest.skip(why)
    with Lab.up(tmp_path_factory.mktemp("flaws") / "lab", nodes=3, backend="namespaces") as lab:
        yield Trials(lab)


def test_nothing_is_found_where_nothing_is_wrong(trials: Trials) -> None:
    """Also ships the code, which one of the flaws damages."""
    seen = preflight(trials.lab)
    assert (seen.findings, seen.error) == ((), "")


@pytest.mark.parametrize("name", CHOICE)
def test_flaw_is_found(name: str, trials: Trials) -> None:
    trial = trials.run(catalogue.find(name))
    if not trial.injected:
        pytest.skip(trial.why_not)
    assert trial.found, (trial.error, trial.findings)
    assert trial.right_node and trial.hint, trial.findings
    assert trial.seconds < 60.0, "2 to 5 s on an idle machine; whoever waits for each of the time-outs takes minutes"


def test_nothing_is_left_of_the_flaws(trials: Trials) -> None:
    """The nodes are healthy again, with the recipe too."""
    seen = preflight(trials.lab, trials.recipe)
    assert (seen.findings, seen.error) == ((), "")


def test_practice_recipe_is_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(material.RECIPE)
    recipe = load_recipe(file)
    assert recipe.model and recipe.model.name == f"~/{material.MODEL_FOLDER}"
