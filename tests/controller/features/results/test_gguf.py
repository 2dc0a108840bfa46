"""The GGUF file of a run, from its node: under which name it comes, and what is said where it does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.features.results import gguf, llama_cpp, make
from homelab.controller.features.results.best_copy import ModelHolder
from homelab.controller.remote.agent import Agent
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import result_files
from tests.fakes import FakeFleet

RUN = "2026-01-01-0000-größe"


@pytest.mark.parametrize(
    ("run", "name"),
    [(RUN, "2026-01-01-0000-gro-e"), ("2026-01-01-0000-é.x_1", "2026-01-01-0000-e.x_1"), ("2026-01-01-0000-模型", "2026-01-01-0000--")],
)
def test_a_name_of_any_script_becomes_one_that_may_leave_the_node(run: str, name: str) -> None:
    assert result_files.ascii_name(run) == name and result_files.is_name(result_files.gguf_file(run, "q4_k_m"))


@pytest.mark.parametrize(("written", "comes"), [("2026-01-01-0000-gro-e-q8_0.gguf", True), (f"{RUN}-q8_0.gguf", False)])
def test_a_run_with_other_letters_brings_its_file_or_says_that_it_did_not(
    written: str, comes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tower/runs" / RUN / "gguf-q8_0"
    folder.mkdir(parents=True)
    (folder / written).write_bytes(b"GGUF\x03")
    (folder / "README.md").write_text("card")
    described = SimpleNamespace(run_json={}, recipe=SimpleNamespace(method=None, objective=None))
    monkeypatch.setattr(run_folder, "description_of", lambda paths: described)
    monkeypatch.setattr(run_folder, "refuse_scores", lambda paths: None)
    monkeypatch.setattr(gguf, "_whole_model", lambda *_: ModelHolder(node="tower", folder="merged"))
    monkeypatch.setattr(llama_cpp, "archive", lambda *_: ("digest", b""))
    monkeypatch.setattr(make, "run_node_program", lambda *_: make.Made(folder="gguf-q8_0"))
    monkeypatch.setattr(Agent, "unpack", lambda *_, **__: None)
    place, wanted = tmp_path / "here", gguf.GgufRequest("q8_0", None)
    if comes:
        gguf.gguf(FakeFleet(tmp_path), RunPaths(tmp_path / RUN), wanted, place, lambda text: None)
        assert (place / written).is_file()
        return
    with pytest.raises(HomelabError) as raised:
        gguf.gguf(FakeFleet(tmp_path), RunPaths(tmp_path / RUN), wanted, place, lambda text: None)
    assert raised.value.message == f"the node has not sent 2026-01-01-0000-gro-e-q8_0.gguf (it kept {written})"
    assert raised.value.hint == f"homelab gguf --quantise q8_0 '{RUN}'"
