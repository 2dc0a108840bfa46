"""Which runs go, and why others stay."""

from __future__ import annotations

import pytest

from homelab.controller.run.pruning import PrunableRun, choose

OVER = [
    PrunableRun("r4", "done", {"here": 1}),
    PrunableRun("r3", "failed"),
    PrunableRun("r2", "stopped"),
    PrunableRun("r1", "done", result_on="tower"),
    PrunableRun("r0", "failed", result_on="attic", result="saved", step=40),
]


def test_without_names_the_newest_and_the_only_copy_of_a_model_stay() -> None:
    going, staying = choose(OVER, [], 1)
    assert [run.name for run in going] == ["r3", "r2"]
    assert staying == {
        "r4": "it is the newest",
        "r1": "its trained model is only on tower",
        "r0": "what its program has saved is only on attic",
    }
    assert [run.name for run in choose(OVER, [], 0)[0]] == ["r4", "r3", "r2"]
    assert choose([], [], 1) == ([], {})


def test_a_named_one_goes_alone() -> None:
    going, staying = choose(OVER, ["r1"], 1)
    assert [run.name for run in going] == ["r1"] and staying == {}
    assert [run.name for run in choose(OVER, ["r4"], 1)[0]] == ["r4"]


@pytest.mark.parametrize("state", ["running", "starting", "shipping", "planned", "recovering", ""])
@pytest.mark.parametrize("named", [[], ["r"]])
def test_a_run_that_goes_on_never_goes(state: str, named: list[str]) -> None:
    assert choose([PrunableRun("r", state)], named, 0)[0] == []


def test_one_at_which_somebody_works_never_goes() -> None:
    for run in (
        PrunableRun("r", "failed", busy="its supervisor is working here"),
        PrunableRun("r", "done", unasked=["laptop"]),
        PrunableRun("r", "lost", unasked=["laptop"]),
    ):
        going, staying = choose([run], ["r"], 0)
        assert going == [] and staying["r"]
