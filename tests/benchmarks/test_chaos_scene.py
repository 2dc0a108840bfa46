"""A case of `scripts/chaos` that this machine cannot play is neither survived nor failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from benchmarks.faults.ground import Ground
from benchmarks.faults.scene import Case, Scene, play

from scripts.practice.misconfigurations.misconfiguration import NotInjectable


def ground(undone: list[str]) -> Ground:
    fake: Any = SimpleNamespace(lab=None, launch=None, reference=None, epochs=1, restore=lambda: undone.append("ground"))
    return cast(Ground, fake)


def test_what_this_machine_lacks_is_no_failure() -> None:
    undone: list[str] = []

    def lacks(scene: Scene) -> None:
        scene.undo.callback(undone.append, "fault")
        raise NotInjectable("cc is not installed", hint="apt install gcc")

    outcome = play(ground(undone), Case("clock-jump", "", "quiet", lacks), seed=1)
    assert (outcome.survived, outcome.why) == (False, [])
    assert "cc is not installed" in outcome.missing and "apt install gcc" in outcome.missing
    assert undone == ["fault", "ground"]


def test_a_case_that_goes_wrong_has_failed() -> None:
    def fails(scene: Scene) -> None:
        assert scene.reference is not None, "no reference"

    outcome = play(ground([]), Case("clock-jump", "", "quiet", fails), seed=1)
    assert (outcome.survived, outcome.missing) == (False, "") and "no reference" in outcome.why[0]
