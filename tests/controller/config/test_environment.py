"""`environment` of a node and of a recipe: what may stand there, and what is refused with its reason and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config.cluster import EnergyPrice, Notify
from homelab.controller.config.load import cluster_text, load_cluster, load_recipe
from tests.controller.config.test_cluster import faults, load, node

REFUSED = [
    ("RANK", "its rank"), ("MASTER_ADDR", "the address of the head"), ("PET_NNODES", "the address of the head"), ("LOCAL_RANK", "its rank"),
    ("CUDA_VISIBLE_DEVICES", "`gpus` of the node"), ("CUDA_DEVICE_ORDER", "`gpus` of the node"), ("NCCL_SOCKET_IFNAME", "`interface`"),
    ("GLOO_SOCKET_IFNAME", "`interface`"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "when another rank is gone"), ("NCCL_DEBUG_FILE", "when another rank is gone"),
    ("HOMELAB_RUN", "homelab sets it itself"), ("PYTHONPATH", "its own code on the node"), ("HOME", "`workdir`"), ("WANDB_API_KEY", "log in on the node"),
    ("PGPASSWORD", "log in on the node"), ("GITHUB_PAT", "log in on the node"),
    ("HF_TOKEN", "export HF_TOKEN"), ("A-B", "letters of the alphabet"), ("1A", "letters of the alphabet"), ("", "letters of the alphabet"),
]  # fmt: skip
LAW = ["PYTHONHASHSEED", "PYTHONOPTIMIZE", "ACCELERATE_MIXED_PRECISION", "NVIDIA_TF32_OVERRIDE"]
RECIPE = '[model]\nname = "/m"\n[data]\ntrain = "/d.jsonl"\n[method]\nkind = "lora"\n[train]\nglobal_batch = 4\nsteps = 1\nlearning_rate = 1e-3\n'
SCRIPT = '[script]\npath = "train.py"\n'


def recipe_faults(folder: Path, text: str) -> list[str]:
    (folder / "r.toml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_recipe(folder / "r.toml")
    assert caught.value.where == str(folder / "r.toml") and caught.value.hint
    return caught.value.message.splitlines()[1:]


@pytest.mark.parametrize(("name", "why"), [*REFUSED, *((name, "a recipe alone decides the training") for name in LAW)])
def test_a_variable_that_a_node_cannot_have(tmp_path: Path, name: str, why: str) -> None:
    (line,) = faults(tmp_path, node(f'[nodes.environment]\nA = "1"\n"{name}" = "not-shown"'))
    assert f"{name} cannot be set here" in line and why in line and "not-shown" not in line
    assert line.strip().startswith("line 6, nodes.#1.environment") or not name


@pytest.mark.parametrize(("name", "why"), REFUSED)
def test_a_variable_that_a_recipe_cannot_have(tmp_path: Path, name: str, why: str) -> None:
    for recipe in (RECIPE, SCRIPT):
        (line,) = recipe_faults(tmp_path, f'{recipe}[environment]\n"{name}" = "not-shown"\n')
        assert f"{name} cannot be set here" in line and why in line and "not-shown" not in line and "environment" in line


@pytest.mark.parametrize("name", LAW)
def test_what_a_script_may_set_for_all_its_ranks(tmp_path: Path, name: str) -> None:
    (line,) = recipe_faults(tmp_path, f'{RECIPE}[environment]\n{name} = "1"\n')
    assert f"[environment] {name} cannot be set here" in line and "[train]" in line
    (tmp_path / "s.toml").write_text(f'{SCRIPT}[environment]\n{name} = "1"\n')
    assert load_recipe(tmp_path / "s.toml").environment == {name: "1"}


@pytest.mark.parametrize("value", ["1", "true", '["a"]', '"a\\nb"', '"\\u001b[2J"'])
def test_values_are_one_line_of_text(tmp_path: Path, value: str) -> None:
    (line,) = faults(tmp_path, node(f"environment = {{ A = {value} }}"))
    assert "environment.A" in line and "\x1b" not in line


def test_each_variable_of_the_defaults_by_itself(tmp_path: Path) -> None:
    text = '[defaults.environment]\nA = "of all"\nB = "of all"\n' + node('environment = { B = "its own", C = "x" }')
    cluster = load(tmp_path, text)
    assert cluster.nodes[0].environment == {"A": "of all", "B": "its own", "C": "x"}
    (line,) = faults(tmp_path, text.replace("A =", "RANK ="))
    assert line.strip().startswith("line 2, defaults.environment.RANK: RANK cannot be set here")


def test_it_is_written_as_it_is_read(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        node('environment = { A = "it\'s \\"odd\\" $(x) \\\\ ä" }\ngpus = [{ model = "RTX 4090", vram_gb = 24, uuid = "GPU-1a2b" }]'),
    )
    cluster = cluster.model_copy(
        update={"energy": EnergyPrice(price_per_kwh=0.3, currency="EUR"), "notify": Notify(command="say", on=("done",))}
    )
    (tmp_path / "again.toml").write_text(cluster_text(cluster))
    assert load_cluster(tmp_path / "again.toml") == cluster


@pytest.mark.parametrize("card", ['uuid = "4090"', 'uuid = "GPU-1a", index = 1', "index = -1", 'uuid = "GPU-$(x)"'])
def test_a_card_that_cannot_be_meant(tmp_path: Path, card: str) -> None:
    assert len(faults(tmp_path, node(f'gpus = [{{ model = "RTX 4090", vram_gb = 24, {card} }}]'))) == 1


@pytest.mark.parametrize("login", ["mine:pass", "mine:pa@ss", "mine:pa/ss", "mine"])
def test_a_login_is_kept_nowhere(tmp_path: Path, login: str) -> None:
    (line,) = faults(tmp_path, node(f'environment = {{ HTTPS_PROXY = "http://{login}@proxy:3128" }}'))
    assert "environment.HTTPS_PROXY" in line and "/etc/environment" in line and login not in line
    assert load(tmp_path, node('environment = { HF_ENDPOINT = "https://mirror:8080/models@v1" }'))


def test_one_card_is_named_once(tmp_path: Path) -> None:
    for which in ("index = 0", 'uuid = "GPU-1A2b"'):
        entry = f'{{ model = "RTX 4090", vram_gb = 24, {which} }}'
        (line,) = faults(tmp_path, node(f"gpus = [{entry}, {entry}]"))
        assert "two entries of `gpus` name the same card" in line
