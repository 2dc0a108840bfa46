"""Weighing and removing the folders of runs on a node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from homelab.node.run import secret_files
from homelab.shared.protocol import files, manifest
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.message import Done
from homelab.shared.protocol.result_messages import RunFolder, RunFolders
from tests.fakes import ask_node
from tests.processes import living

pytestmark = pytest.mark.timeout(30)
RUN = "2026-01-01-0000-over"


@pytest.fixture
def request_of(tmp_path: Path) -> dict[str, str]:
    files.write_json(tmp_path / "runs" / RUN / "run.json", {"name": RUN})
    (tmp_path / "runs" / RUN / "big").write_bytes(os.urandom(1 << 20))
    (tmp_path / "runs" / "notes").mkdir()
    return {"workdir": str(tmp_path), "node": "laptop", "run": RUN}


def weighed(request_of: dict[str, str]) -> dict[str, RunFolder]:
    folders: RunFolders = ask_node("run-weigh", {name: request_of[name] for name in ("workdir", "node")})
    return folders.runs


def test_it_goes_whole_and_nothing_else(tmp_path: Path, request_of: dict[str, str]) -> None:
    secret_files.put(str(tmp_path / "runs" / RUN), {"HF_TOKEN": "hf_PlantedPlanted42"})
    (tmp_path / "supervised" / RUN).mkdir(parents=True)
    (tmp_path / "runs" / ".removed-of-a-call-that-was-killed").mkdir()
    ((name, folder),) = weighed(request_of).items()
    assert name == RUN and 1 << 20 <= folder.bytes < 2 << 20 and not folder.busy and not folder.result and not folder.step
    for _ in range(2):
        assert ask_node("run-remove", request_of) == Done()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["notes"] and not list((tmp_path / "supervised").iterdir())
    assert not secret_files.has(str(tmp_path / "runs" / RUN))


def test_one_that_lives_stays(tmp_path: Path, request_of: dict[str, str]) -> None:
    environment = {"HOMELAB_RUN": RUN, "HOMELAB_NODE": "laptop", "HOMELAB_RUN_DIR": str(tmp_path / "runs" / RUN)}
    with living(**environment):
        assert weighed(request_of)[RUN].busy == "it is running on this node"
        with pytest.raises(Refusal, match="it is running on this node"):
            ask_node("run-remove", request_of)
    assert (tmp_path / "runs" / RUN / "big").exists()


def test_one_that_is_claimed_stays(tmp_path: Path, request_of: dict[str, str]) -> None:
    ask_node("claim", {**request_of, "token": "t", "by": "a desk", "doing": "recover", "process": {}, "age_s": 0.0, "after": None})
    with pytest.raises(Refusal, match="a command is about to continue it"):
        ask_node("run-remove", request_of)
    ask_node("release", {**request_of, "token": "t"})
    ask_node("run-remove", request_of)


@pytest.mark.parametrize("name", ["../x", "", "..", "a/b"])
def test_a_name_that_climbs(request_of: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match="not a usable name"):
        ask_node("run-remove", {**request_of, "run": name})


def test_what_a_person_would_miss_is_said(tmp_path: Path, request_of: dict[str, str]) -> None:
    folder = tmp_path / "runs" / RUN
    saved = folder / "saved" / "out"
    saved.mkdir(parents=True)
    (folder / "saved" / ".half").write_text("")
    assert weighed(request_of)[RUN].result == ""
    (saved / "größe.bin").write_text("what has an odd name counts, too")
    assert weighed(request_of)[RUN].result == "saved"
    (folder / "final").mkdir()
    assert weighed(request_of)[RUN].result == "saved", "a model without its card is half written"
    (folder / "final" / "README.md").write_text("")
    assert weighed(request_of)[RUN].result == "final"
    files.write_json(folder / "checkpoints" / "step-00000040" / manifest.MANIFEST, {})
    assert weighed(request_of)[RUN].step == 40
