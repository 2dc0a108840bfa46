"""The reference files, the definitions and the JSON Schema say the same: every key of one stands in the others."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter

from homelab.cli.main import run
from homelab.controller.base.errors import InputError
from homelab.controller.config import cluster, load, reference, schema, suite
from homelab.controller.config.recipe import RecipeFile

ROOT = Path(__file__).parents[3]
SHIPPED = sorted([ROOT / "cluster.toml", *(ROOT / "recipes").rglob("*.toml")])
MISTAKES = Path(__file__).parent / "eight_mistakes.toml"
CLUSTER = {"network": cluster.NetworkSettings, "energy": cluster.EnergyPrice, "notify": cluster.Notify, "nodes": cluster.Node}
NO_DEFAULT = object()


def defaults_of(name: str) -> dict[str, Any]:
    """Key -> its default, `NO_DEFAULT` for a key that is needed."""
    kind, _, part = name.partition(".")
    if name == "cluster.cluster":
        return {key: cluster.Cluster.model_fields[key].default for key in ("name", "network", "known_hosts")}
    model: Any = suite.Suite if kind == "suite" else CLUSTER.get(part) if kind == "cluster" else RecipeFile.model_fields[part].annotation
    model = next((one for one in get_args(model) if dataclasses.is_dataclass(one)), model)
    if dataclasses.is_dataclass(model):
        return {field.name: NO_DEFAULT if field.default is dataclasses.MISSING else field.default for field in dataclasses.fields(model)}
    return {key: NO_DEFAULT if field.is_required() else field.default for key, field in model.model_fields.items()}


def plain(value: Any) -> Any:
    return json.loads(TypeAdapter(type(value)).dump_json(value))


WITH_KEYS = [name for name in reference.names() if name != "recipe.environment"]


@pytest.mark.parametrize("name", WITH_KEYS)
def test_file_and_definition_have_the_same_keys_and_defaults(name: str) -> None:
    defaults, keys = defaults_of(name), {key.name: key for key in reference.page(name).keys}
    assert sorted(keys) == sorted(defaults)
    for key, default in defaults.items():
        if default is None:
            assert keys[key].is_left_out or key == "epochs", f"{key} is left out by default: #{key} = EXAMPLE"
        elif default is not NO_DEFAULT:
            assert not keys[key].is_left_out and plain(keys[key].value) == plain(default), key


@pytest.mark.parametrize("name", reference.names())
def test_every_section_and_key_is_described(name: str) -> None:
    page = reference.page(name)
    assert page.description.endswith(".") and all(key.description.endswith(".") for key in page.keys), name
    described = {key for key, shape in schema.section(name).get("properties", {}).items() if shape.get("description")}
    if name in WITH_KEYS:
        assert {key.name for key in page.keys} <= described


def example(kind: str, *, of: str = "", key: reference.Key | None = None) -> str:
    """A whole file of the examples; with one key that is left out by default."""
    parts = [name for name in reference.names() if name.partition(".")[0] == kind and name != "recipe.script"]
    lines = []
    for name in parts:
        section = name.partition(".")[2]
        lines.append("" if not section else "[[nodes]]" if section == "nodes" else f"[{section}]")
        lines += [f"{one.name} = {one.written}" for one in reference.page(name).keys if not one.is_left_out]
        if key is not None and name == of:
            lines.append(f"{key.name} = {key.written}")
    return "\n".join(lines)


def test_the_examples_are_valid_files(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(example("cluster"))
    (tmp_path / "recipe.toml").write_text(example("recipe"))
    (tmp_path / "bench").mkdir()
    (tmp_path / "demo.toml").write_text(example("recipe"))
    (tmp_path / "bench" / "suite.toml").write_text(example("suite"))
    load.load_cluster(tmp_path / "cluster.toml")
    load.load_recipe(tmp_path / "recipe.toml")
    suite.load_suite(tmp_path / "bench" / "suite.toml")


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in reference.names() for key in reference.page(name).keys if key.is_left_out], ids=str
)
def test_the_example_of_a_key_is_valid(name: str, key: reference.Key, tmp_path: Path) -> None:
    file = tmp_path / "file.toml"
    file.write_text(example(name.partition(".")[0], of=name, key=key))
    try:
        (load.load_cluster if name.startswith("cluster") else load.load_recipe)(file)
    except InputError as error:  # a rule over several keys may speak; the key itself is no fault
        assert f".{key.name}:" not in error.message, error.message


@pytest.mark.parametrize("kind", schema.KINDS)
def test_the_shipped_schema_is_that_of_the_command(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", kind]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((ROOT / "recipes" / "schemas" / f"{kind}.json").read_text()), (
        f"homelab schema {kind} > recipes/schemas/{kind}.json"
    )


@pytest.mark.parametrize("file", [*SHIPPED, MISTAKES], ids=lambda file: file.name)
def test_a_shipped_file_names_its_schema(file: Path) -> None:
    first = file.read_text().splitlines()[0]
    assert first.startswith("#:schema ") and (file.parent / first.removeprefix("#:schema ")).is_file()


def faults_here() -> set[str]:
    with pytest.raises(InputError) as caught:
        load.load_recipe(MISTAKES)
    return set(re.findall(r"^  (?:line \d+, )?([\w.]+):", caught.value.message, re.MULTILINE))


def test_eight_mistakes_are_eight_faults() -> None:
    assert faults_here() == {
        "model.name", "data.eval_fraction", "train.global_batch", "train.learning_rate", "train.schedule", "train.lr_scael", "checkpoint.keep", "trackign",
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("taplo") is None, reason="taplo is not installed (npm install -g @taplo/cli)")
def test_taplo_finds_no_fault_in_shipped_files_and_the_same_eight_mistakes() -> None:
    assert subprocess.run(["taplo", "lint", *map(str, SHIPPED)], cwd=ROOT, capture_output=True, check=False).returncode == 0
    found = subprocess.run(["taplo", "lint", "--colors", "never", str(MISTAKES)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert set(re.findall(r"^error: (.*)$", found.stderr, re.MULTILINE)) == {
        '"name" is a required property', "0.9 is greater than the maximum of 0.5", "0 is less than the minimum of 1", '"fast" is not of type "number"',
        '"cosin" is not one of ["cosine","linear","constant"]', "Additional properties are not allowed ('lr_scael' was unexpected)",
        '2.5 is not of type "integer"', "Additional properties are not allowed ('trackign' was unexpected)",
    }  # fmt: skip


def test_explain_shows_a_key_a_section_and_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "recipe.train.lr_scale"]) == 0
    shown = capsys.readouterr().out
    assert '"none", "linear", "sqrt"' in shown and "default" in shown and "needs `reference_batch`" in shown
    assert run(["explain", "recipe.checkpoint"]) == 0
    assert "#every_steps = 100" in capsys.readouterr().out
    assert run(["explain", "recipe"]) == 0
    assert "recipe.train" in capsys.readouterr().out
    assert run(["explain", "recipe.train.lr_scael"]) != 0
    assert 'Did you mean "lr_scale"?' in capsys.readouterr().err
    assert run(["explain", "cluster.nodes.port", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["allowed"] == "at least 1, at most 65535"


def test_a_limit_of_the_definition_is_one_of_the_schema() -> None:
    assert issubclass(RecipeFile, BaseModel)
    train = schema.section("recipe.train")
    assert train["properties"]["seq_len"] | {"description": ""} == {
        "type": "integer", "minimum": 8, "maximum": 1_048_576, "default": 1024, "description": "",
    }  # fmt: skip
    assert train["additionalProperties"] is False and train["required"] == ["global_batch", "learning_rate"]
