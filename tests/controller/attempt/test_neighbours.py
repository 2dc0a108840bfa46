"""What a [script] brings along: the modules that it imports from beside it, what its recipe names, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from homelab.controller.attempt import inputs, script_imports, start
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import InputError
from homelab.controller.config.recipe import parse_recipe
from homelab.controller.features.launch import start_run
from homelab.controller.run import fingerprint
from homelab.controller.run import shipped_files as shipped
from homelab.controller.run.paths import RunPaths
from homelab.node.run import supervisor_host
from homelab.node.storage import transfer
from tests.controller.checks import healthy
from tests.controller.features.recover.test_ship import Nodes

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with a recipe, a program, and more than it needs."""
    for name, text in {
        "train.py": "import os, helper\nfrom lib import model\nimport plain.part\nprint(helper.SAID, model.NAME, plain.part.NUMBER)\n",
        "helper.py": "import importlib\nSAID = importlib.import_module('late').WORD\n",
        "late.py": "WORD = 'late'\n",
        "lib/__init__.py": "",
        "lib/model.py": "from .deep import NAME\n",
        "lib/deep.py": "NAME = 'deep'\n",
        "plain/part.py": "from .number import NUMBER\n",
        "plain/number.py": "NUMBER = 7\n",
        "plain/unused.py": "",
        "stranger.py": "raise SystemExit('nobody imports this')\n",
        "config/base.yaml": "a: 1\n",
        "config/.hidden": "",
        "os_notes/x.py": "",
        "recipe.toml": "",
    }.items():
        (tmp_path / "desk" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "desk" / name).write_text(text)
    return tmp_path / "desk"


def of(desk: Path, *named: str, path: str = "train.py") -> list[RecipeInput]:
    recipe = parse_recipe({"script": {"path": path, "files": list(named)}})
    return inputs.of_recipe(recipe, desk / "recipe.toml")


IMPORTED = ["helper.py", "late.py", "lib/__init__.py", "lib/deep.py", "lib/model.py", "plain/number.py", "plain/part.py"]


def test_what_it_imports_is_found_through_all_of_it_and_nothing_else(desk: Path) -> None:
    assert list(script_imports.beside(desk / "train.py", [], desk / "recipe.toml")) == IMPORTED
    assert list(script_imports.beside(desk / "stranger.py", [], desk / "recipe.toml")) == []
    named = script_imports.beside(desk / "stranger.py", ["config", "helper.py"], desk / "recipe.toml")
    assert list(named) == ["config/base.yaml", "helper.py", "late.py"], "what is named is looked into, too"


def test_a_program_that_python_refuses_is_shipped_alone(desk: Path) -> None:
    (desk / "train.py").write_text("import helper\ndef (\n")
    assert [item.role for item in of(desk)] == ["script"]


def test_what_cannot_be_shipped_is_refused_with_what_mends_it(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (desk.parent / "above.yaml").write_text("a: 1")
    with pytest.raises(InputError, match="is not in the folder of the script") as refused:
        of(desk, "../above.yaml")
    assert "key script.files" in refused.value.where and "[script] args" in refused.value.hint
    with pytest.raises(InputError, match="this file does not exist"):
        of(desk, "nowhere.yaml")
    monkeypatch.setattr(script_imports, "MOST_FILES", 3)
    with pytest.raises(InputError, match="7 files of 0 MB would be sent with the script"):
        of(desk)
    monkeypatch.undo()
    (desk / "late.py").unlink()
    (desk / "late.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    with pytest.raises(InputError, match="late, which is compiled for this machine") as refused:
        of(desk)
    assert str(desk / "helper.py") in refused.value.where


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(desk: Path) -> None:
    (desk / "late.py").chmod(0)
    with pytest.raises(InputError, match="cannot be read"):
        of(desk)


def described(items: list[RecipeInput]) -> dict[str, Any]:
    """As `launch.describe` writes them into run.json."""
    return {
        item.role: {
            "kind": "file",
            "sent": item.kind,
            "path": item.path,
            "name": cast(Path, item.local).name,
            "sha256": item.sha256,
            **item.place,
        }
        for item in items
    }


def test_all_of_it_lies_together_on_a_node_and_runs_there(desk: Path, tmp_path: Path) -> None:
    items = of(desk, "config")
    nodes = Nodes(tmp_path / "nodes")
    start.ship_material(nodes, ["a"], items, lambda text: None)
    place = Path(items[0].node_path(str(tmp_path / "nodes" / "a")))
    assert sorted(str(file.relative_to(place.parent)) for file in place.parent.rglob("*") if file.is_file()) == sorted(
        ["train.py", "config/base.yaml", *IMPORTED]
    )
    done = subprocess.run([sys.executable, str(place)], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.stdout == "late deep 7\n", done.stderr
    start.ship_material(nodes, ["a"], items, lambda text: None)
    assert nodes.verbs("receive-file") == ["a"] * len(items), "what is there is not sent again"


def test_an_edited_neighbour_is_another_training_and_lies_elsewhere(desk: Path) -> None:
    before = of(desk)
    (desk / "late.py").write_text("WORD = 'later'\n")
    after = of(desk)
    assert before[0].sha256 == after[0].sha256 and before[0].node_path("/w") != after[0].node_path("/w")
    laws = [fingerprint.fingerprint({"recipe": {"script": {"path": "train.py"}}, "data": described(items)}) for items in (before, after)]
    assert None not in laws and laws[0] != laws[1]


def test_a_script_alone_lies_where_it_always_did(desk: Path) -> None:
    (item,) = of(desk, path="stranger.py")
    assert item.node_path("/w") == f"/w/data/{str(item.sha256)[:16]}/stranger.py" and item.place == {}
    assert set(described([item])["script"]) == {"kind", "sent", "path", "name", "sha256"}


def test_a_recovery_has_the_program_as_it_was_at_the_launch(desk: Path, tmp_path: Path) -> None:
    items = of(desk)
    paths = RunPaths(tmp_path / "runs" / "r")
    start_run._snapshot(
        paths, cast(Any, type("Prepared", (), {"recipe_path": desk / "recipe.toml", "recipe_text": None, "material": items}))
    )
    (desk / "lib" / "deep.py").write_text("NAME = 'edited'\n")
    again = inputs.of_run(paths, {"data": described(items)})
    assert [item.node_path("/w") for item in again] == [item.node_path("/w") for item in items]
    edited = next(item for item in again if item.role == "script:lib/deep.py")
    assert edited.local == paths.code / "lib/deep.py" and edited.local.read_text() == "NAME = 'deep'\n"
    assert next(item for item in again if item.role == "script").local == desk / "train.py"


def test_two_files_of_one_name_are_both_kept(desk: Path, tmp_path: Path) -> None:
    """Rows to train on and held-out ones, in two folders. A node that joins later gets what the run began with."""
    for role in ("train", "eval"):
        (desk / role).mkdir()
        (desk / role / "data.jsonl").write_text(f'{{"text": "{role}"}}\n')
    items = inputs.of_recipe(healthy.recipe(data={"train": "train/data.jsonl", "eval": "eval/data.jsonl"}), desk / "recipe.toml")
    run_json: dict[str, Any] = {"data": described(items)}
    paths, nodes, at_node = RunPaths(tmp_path / "runs" / "r"), Nodes(tmp_path / "nodes"), RunPaths(tmp_path / "supervisor")
    start_run._snapshot(
        paths, cast(Any, type("Prepared", (), {"recipe_path": desk / "recipe.toml", "recipe_text": None, "material": items}))
    )
    start.ship_material(nodes, ["a"], items, lambda text: None)
    at_node.root.mkdir()
    (at_node.root / "run.json").write_text(json.dumps(run_json))
    for _ in range(2):  # of a second attempt, too
        supervisor_host._link_data(str(tmp_path / "nodes" / "a"), str(at_node.root))
    for item in items:
        assert item.local is not None
        item.local.write_text("edited\n")
    for place in (paths, at_node):
        again = {item.role: item.local for item in inputs.of_run(place, run_json)}
        assert {role: local.read_text() for role, local in again.items() if local} == {
            role: f'{{"text": "{role}"}}\n' for role in ("train", "eval")
        }
        assert {local.name for local in again.values() if local} == {"data.jsonl"} and len(list(place.code.rglob("data.jsonl"))) == 2


def test_a_supervisor_on_a_node_takes_the_program_from_there(desk: Path, tmp_path: Path) -> None:
    items = of(desk)
    nodes = Nodes(tmp_path / "nodes")
    start.ship_material(nodes, ["a"], items, lambda text: None)
    here = tmp_path / "supervisor"
    here.mkdir()
    (here / "run.json").write_text(json.dumps({"data": described(items)}))
    supervisor_host._link_data(str(tmp_path / "nodes" / "a"), str(here))
    assert (here / "code" / "lib" / "deep.py").read_text() == "NAME = 'deep'\n"


@pytest.mark.parametrize("inside", ["../x", "/etc/x", "a/../../x", "", "a//b", "."])
def test_a_place_that_leads_out_of_its_folder_is_refused(tmp_path: Path, inside: str) -> None:
    with pytest.raises(ValueError, match="not a usable place"):
        transfer.data_path(str(tmp_path), {"sha256": "0" * 64, "folder": "1" * 64, "inside": inside, "name": "x"})


def test_an_error_in_a_neighbour_is_corrected_in_the_persons_own_file(desk: Path) -> None:
    items = of(desk)
    own = shipped.of_run({"recipe_file": "r.toml", "data": described(items)})
    copy = f"{items[0].node_path('/w').removesuffix('train.py')}lib/deep.py:1"
    assert next(place for file in own if (place := file.place(copy))) == f"{desk}/lib/deep.py:1"
    assert shipped.script_of({"data": described(items)}) == str(desk / "train.py")
    assert shipped.script_of({"data": {"train": None}}) is None


def test_modules_near_a_script_are_those_beside_it_and_one_above(desk: Path) -> None:
    (desk.parent / "common.py").write_text("")
    near = script_imports.modules_near(desk / "train.py")
    assert (
        near["helper"] == str(desk / "helper.py") and near["lib"] == str(desk / "lib") and near["common"] == str(desk.parent / "common.py")
    )
    assert "train" not in near and "config" not in near
    assert script_imports.modules_near(Path("/nowhere/at/all.py")) == {}
