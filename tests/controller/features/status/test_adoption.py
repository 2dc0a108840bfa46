"""A run that only the nodes know: its names stay in its folder, its nodes have to agree on it, and its program is asked for."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import inputs, start
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.config.recipe import parse_recipe
from homelab.controller.features.recover import resume, resume_guards
from homelab.controller.run import adoption, fingerprint, run_folder, run_record, store
from homelab.controller.run.paths import RunPaths
from tests import builders, watched
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)
NAMES = builders.NAMES
SECRET = "-----BEGIN OPENSSH PRIVATE KEY----- canary"
DIGEST = hashlib.sha256(b"rows").hexdigest()
SCRIPT = {"script": {"path": "train.py", "args": ("--lr", "3"), "files": ()}, "environment": {"PROXY": "x"}}


def run_json(data: dict[str, Any], recipe: dict[str, Any] | None = None) -> dict[str, Any]:
    described = {
        "schema": 1, "name": builders.RUN, "created_at": 1.0, "moment": builders.MOMENT, "rows": 2, "data": data, "recipe_file": "demo.toml",
        "recipe": (builders.recipe() if recipe is None else parse_recipe(recipe)).model_dump(mode="json"),
    }  # fmt: skip
    return described | {"recipe_hash": fingerprint.fingerprint(described)}


def shipped(**keys: Any) -> dict[str, Any]:
    return {
        "kind": "file",
        "sent": "shipped",
        "path": f"/home/me/homelab/data/{DIGEST[:16]}/rows.jsonl",
        "name": "rows.jsonl",
        "sha256": DIGEST,
        **keys,
    }


def describing(tmp_path: Path, described: dict[str, dict[str, Any]]) -> FakeFleet:
    """A fleet in which these nodes know the run."""
    fleet = FakeFleet(tmp_path / "nodes")
    plan = builders.plan().model_dump(mode="json")
    for name in NAMES:
        known = {"run_json": described.get(name), "plans": {"1": plan} if name in described else {}}
        fleet.answer("describe", known, [name])
    return fleet


def adopt(tmp_path: Path, described: dict[str, dict[str, Any]]) -> tuple[FakeFleet, RunPaths]:
    fleet = describing(tmp_path, described)
    return fleet, adoption.adopt(fleet, RunPaths(tmp_path / "desk" / builders.RUN), list(described))


OUTSIDE = {
    "climbs": lambda secret: {"name": f"../../{secret.name}"},
    "is absolute": lambda secret: {"name": str(secret)},
    "climbs inside": lambda secret: {"folder": "a" * 64, "inside": f"../../{secret.name}"},
    "is absolute inside": lambda secret: {"folder": "a" * 64, "inside": str(secret)},
    "climbs in the middle": lambda secret: {"name": f"x/../../../{secret.name}"},
    "holds a zero": lambda secret: {"name": "rows\0.jsonl"},
    "is the folder itself": lambda secret: {"name": "."},
    "is empty": lambda secret: {"name": ""},
    "is no text": lambda secret: {"name": ["rows.jsonl"]},
    "is missing": lambda secret: {"name": None},
    "is endless": lambda secret: {"name": "x" * 100_000},
    "has no digest": lambda secret: {"sha256": None},
    "has another digest": lambda secret: {"sha256": "0" * 63},
    "has a folder that climbs": lambda secret: {"folder": "../../etc"},
    "is of no kind": lambda secret: {"kind": "pipe"},
    "is sent in no way": lambda secret: {"sent": "by mail"},
}  # fmt: skip


@pytest.mark.parametrize("wrong", OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize("role", ["train", "script", "script:lib/part.py"])
def test_an_entry_that_leads_out_of_the_run_is_refused(tmp_path: Path, wrong: Any, role: str) -> None:
    secret = tmp_path / "desk" / "id_ed25519"
    secret.parent.mkdir()
    secret.write_text(SECRET)
    described = run_json({"train": None, role: shipped(**wrong(secret))})
    with pytest.raises(HomelabError, match="description of the run is damaged: data") as caught:
        adopt(tmp_path, dict.fromkeys(NAMES, described))
    assert "node" in caught.value.where and "homelab runs" in caught.value.hint and "mv " in caught.value.hint
    assert not (tmp_path / "desk" / builders.RUN / "run.json").exists()
    # An older version has taken it: it is refused where it is read.
    paths = RunPaths(tmp_path / "desk" / builders.RUN)
    store.write_json(paths.run_json, described)
    with pytest.raises(HomelabError, match=r"run\.json is damaged"):
        run_folder.description_of(paths)


@pytest.mark.parametrize("role", ["../x", "script:../../x", "script:/etc/passwd", "anything", ""])
def test_a_role_that_is_none_is_refused(tmp_path: Path, role: str) -> None:
    with pytest.raises(HomelabError, match="damaged: data"):
        adopt(tmp_path, dict.fromkeys(NAMES, run_json({role: shipped()})))


@pytest.mark.parametrize("sent", ["on-node", "hub"])
def test_a_program_that_lies_on_the_nodes_is_refused(tmp_path: Path, sent: str) -> None:
    described = run_json({"script": shipped(sent=sent, path="/usr/bin/evil")}, SCRIPT)
    with pytest.raises(HomelabError, match="it is sent from the machine"):
        adopt(tmp_path, dict.fromkeys(NAMES, described))


def test_no_file_of_this_machine_is_looked_at_for_an_adopted_run(tmp_path: Path) -> None:
    """Wherever the node says that a file was: only the machine of the launch knows."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    entry = shipped(path=str(secret), sha256=hashlib.sha256(SECRET.encode()).hexdigest())  # it has guessed the content
    fleet, paths = adopt(tmp_path, dict.fromkeys(NAMES, run_json({"train": entry})))

    def looked() -> None:
        described = run_folder.description_of(paths)
        items = inputs.of_run(paths, described.run_json)
        assert resume_guards.changed_here(described.run_json) == []
        with pytest.raises(HomelabError, match=r"not on this node|not here"):
            start.ship_material(fleet, list(NAMES), items, lambda text: None)
        assert watched.opened and str(secret) not in watched.opened and fleet.verbs("receive-file") == []

    watched.apart(looked)


def test_nothing_is_sent_before_its_digest_is_compared_here(tmp_path: Path) -> None:
    fleet, local = FakeFleet(tmp_path / "nodes"), tmp_path / "rows.jsonl"
    local.write_text(SECRET)
    item = RecipeInput("train", "shipped", str(local), local, DIGEST)
    with pytest.raises(HomelabError, match="has changed since the launch"):
        start.ship_material(fleet, list(NAMES), [item], lambda text: None)
    assert fleet.verbs("receive-file") == []


DIFFERENT = {
    "another argument": lambda described: described["recipe"]["script"].update(args=["--evil"]),
    "another program": lambda described: described["data"]["script"].update(sha256="f" * 64),
    "another variable": lambda described: described["recipe"]["environment"].update(LD_PRELOAD="/tmp/evil.so"),
    "another file": lambda described: described["data"].update({"script:part.py": shipped(name="part.py")}),
}  # fmt: skip


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_nodes_that_do_not_agree_are_not_believed(tmp_path: Path, change: Any) -> None:
    honest = run_json({"script": shipped(name="train.py")}, SCRIPT)
    other = copy.deepcopy(honest)
    change(other)
    other["recipe_hash"] = fingerprint.fingerprint(other)  # by somebody who knows how
    with pytest.raises(HomelabError, match="do not agree on what this run is") as caught:
        adopt(tmp_path, {"tower": honest, "laptop": other, "oldtower": honest})
    assert "laptop" in caught.value.message and "mv " in caught.value.hint and ".aside" in caught.value.hint
    assert not (tmp_path / "desk" / builders.RUN / "run.json").exists()


def test_where_the_files_lie_is_each_nodes_own(tmp_path: Path) -> None:
    described = {name: run_json({"train": shipped(path=f"/home/{name}/homelab/data/{DIGEST[:16]}/rows.jsonl")}) for name in NAMES}
    _, paths = adopt(tmp_path, described)
    assert store.read_object(paths.adopted_json)["nodes"] == sorted(NAMES)
    assert adoption.to_ask(paths) is None, "homelab's own worker, as all nodes say"


def test_a_copy_that_was_edited_has_no_vote(tmp_path: Path) -> None:
    honest = run_json({"train": shipped()})
    edited = copy.deepcopy(honest)
    edited["recipe"]["train"]["learning_rate"] = 0.5
    _, paths = adopt(tmp_path, {"tower": edited, "laptop": honest, "oldtower": honest})
    assert store.read_object(paths.run_json)["recipe"] == honest["recipe"]


@pytest.mark.parametrize(
    ("described", "who"),
    [(run_json({"script": shipped(name="train.py")}, SCRIPT), NAMES), (run_json({"train": shipped()}), NAMES[:1])],
    ids=["a program of its own", "one node alone says so"],
)
def test_what_only_nodes_have_said_is_asked_for_before_it_runs(tmp_path: Path, described: dict[str, Any], who: tuple[str, ...]) -> None:
    _, paths = adopt(tmp_path, dict.fromkeys(who, described))
    program = adoption.to_ask(paths)
    assert program is not None and program.nodes == tuple(sorted(who))
    shown = "\n".join(program.lines)
    assert DIGEST[:12] in shown and (
        "train.py with the arguments --lr 3" in shown and "PROXY=x" in shown if len(who) > 1 else "~/models/smol" in shown
    )
    with pytest.raises(InputError, match="did not launch this run") as caught:
        adoption.refuse_unasked(paths)
    assert f"homelab recover {builders.RUN}" in caught.value.hint
    adoption.accept(paths)
    adoption.refuse_unasked(paths)


def test_no_way_goes_around_the_question(tmp_path: Path) -> None:
    """A supervisor goes on with runs by itself: by the same function."""
    _, paths = adopt(tmp_path, dict.fromkeys(NAMES, run_json({"script": shipped(name="train.py")}, SCRIPT)))
    from homelab.controller.run.claims import Claim, ClaimedRun

    fleet = FakeFleet(tmp_path / "nodes")
    run = ClaimedRun(fleet, Claim(fleet, paths.name, "recovered", lambda: 0.0), paths, lambda text: None)
    with pytest.raises(InputError, match="did not launch this run"):
        resume.resume(run, None, None, None)  # type: ignore[arg-type]
    assert fleet.asked == []


def test_the_folder_of_a_run_of_this_machine_is_mended_without_a_question(tmp_path: Path) -> None:
    """What run.json was at the launch is known here, and another program is not taken for it."""
    launched = run_json({"train": None, "eval": None, "script": shipped(name="train.py", path="/home/me/desk/train.py")}, SCRIPT)
    on_nodes = copy.deepcopy(launched)
    on_nodes["data"] = {"eval": None, "script": shipped(name="train.py")}
    for number, (said, asks) in enumerate([(on_nodes, False), ({**on_nodes, "created_at": 2.0}, True)]):
        fleet = describing(tmp_path / str(number), dict.fromkeys(NAMES, said))
        paths = RunPaths(tmp_path / str(number) / "desk" / builders.RUN)
        store.write_json(paths.checks_json, {adoption.RUN_DIGEST: run_record.digest(launched)})
        run_folder.repair(fleet, paths, lambda text: None)
        assert run_folder.is_whole(paths) and (adoption.to_ask(paths) is not None) == asks


def test_it_is_shown_without_secrets_and_escapes(tmp_path: Path) -> None:
    recipe = {"environment": {"A": "x" * 5000, "B": "\x1b]0;owned"}}
    described = run_json({"script": shipped(name="train.py")}, SCRIPT)
    described["recipe"]["environment"] = recipe["environment"]
    described["recipe"]["script"]["args"] = ["\x1b]52;c;x\x07", "--token", "hf_abcdefghijklmnop"]
    paths = RunPaths(tmp_path / builders.RUN)
    store.write_json(paths.run_json, described)
    store.write_json(paths.adopted_json, {"nodes": ["tower"], "asks": True})
    program = adoption.to_ask(paths)
    assert (
        program is not None
        and "hf_abc" not in json.dumps(program.lines)
        and all(line.isprintable() and len(line) <= 300 for line in program.lines)
    )
