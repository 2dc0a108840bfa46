"""Which run a word means: never another one than a person has named in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.run import run_lookup, run_names
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)
RUN = "2026-11-29-1405-qlora"


@pytest.mark.parametrize(
    ("word", "names", "meant"),
    [
        (RUN, [f"{RUN}-2", RUN], RUN),
        (RUN, [f"{RUN}-2"], None),
        (RUN, [f"{RUN}-long"], f"{RUN}-long"),
        (f"{RUN}-", [f"{RUN}-2"], f"{RUN}-2"),
        ("2026-11-29", [f"{RUN}-2"], f"{RUN}-2"),
        ("qlora-2", [RUN, f"{RUN}-2"], f"{RUN}-2"),
        ("my", ["my-2"], "my-2"),
        ("", [RUN], None),
    ],
)
def test_a_part_of_a_name_means_the_only_run_that_has_it(word: str, names: list[str], meant: str | None) -> None:
    assert run_names.choose(word, names) == meant


def test_a_part_of_several_means_none() -> None:
    with pytest.raises(InputError, match='"2026" matches 2 runs'):
        run_names.choose("2026", [RUN, f"{RUN}-2"])


@pytest.mark.parametrize("other", [f"{RUN}-2", f"{RUN}-long"])
def test_a_run_of_another_machine_goes_before_a_longer_name_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    here = builders.run_folder(tmp_path / "runs", name=other)
    adopted: list[str] = []
    monkeypatch.setattr("homelab.controller.run.adoption.adopt", lambda fleet, paths, nodes: adopted.append(paths.name) or here)
    monkeypatch.setattr("homelab.controller.run.run_folder.repair", lambda *_given: None)
    fleet = FakeFleet(tmp_path / "nodes", ["tower"])
    entry = {"name": RUN, "created_at": 9.0, "attempt": 1, "alive": True, "exit": None, "final": False, "busy": ""}
    fleet.answer("runs", {"runs": [entry]})
    run_lookup.run(fleet, tmp_path / "runs", RUN, lambda text: None)
    assert adopted == [RUN]
    assert run_lookup.run(fleet, tmp_path / "runs", other, lambda text: None).name == other and adopted == [RUN]
