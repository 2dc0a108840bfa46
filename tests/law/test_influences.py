"""The list of what may decide a training beside its recipe: every line names a test that is there, and the lines without a test elsewhere have theirs here."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import homelab
from homelab.law.influences import INFLUENCES, of_a_node

ROOT = Path(homelab.__file__).parent
REPOSITORY = ROOT.parent
SHIPPED = [path for room in ("worker", "law") for path in sorted((ROOT / room).rglob("*.py"))]


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def named(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@pytest.mark.parametrize("influence", INFLUENCES, ids=lambda influence: influence.name)
def test_every_line_has_a_test(influence):
    file, _, function = influence.test.partition("::")
    names = {node.name for node in ast.walk(ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)}

    assert function in names and influence.holds


def test_no_locale_decides_how_data_is_read():
    found = []
    for path in SHIPPED:
        for call in calls(path):
            keywords = {keyword.arg for keyword in call.keywords}
            mode = next((str(argument.value) for argument in call.args if isinstance(argument, ast.Constant)), "r")
            mode = next((str(keyword.value.value) for keyword in call.keywords if keyword.arg == "mode" and isinstance(keyword.value, ast.Constant)), mode)
            if named(call) == "setlocale" or (named(call) in ("read_text", "write_text") and "encoding" not in keywords):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
            if named(call) == "open" and "b" not in mode and "encoding" not in keywords and not isinstance(getattr(call.func, "value", None), ast.Name):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert found == []


def test_no_listing_of_a_folder_decides_an_order():
    """In what makes rows or a model, a listing is sorted where it is made."""
    listings = ("iterdir", "listdir", "glob", "rglob", "scandir")
    found = []
    for path in (path for path in SHIPPED if path.parent.name in ("data", "model", "law")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        sorted_ones = {id(inner) for call in ast.walk(tree) if isinstance(call, ast.Call) and named(call) in ("sorted", "set", "sum", "any") for inner in ast.walk(call)}
        found += [f"{path.name}:{call.lineno}" for call in ast.walk(tree) if isinstance(call, ast.Call) and named(call) in listings and id(call) not in sorted_ones]
    assert [place for place in found if not place.startswith("quantised_cache.py")] == [], "that one removes what is too old"


def test_orders_do_not_depend_on_the_hash_seed():
    program = (
        "from homelab.law import order, packing\n"
        "from homelab.worker.data.batches import random_seed\n"
        "print(order.permutation(3, 1, 50), packing.pack([5, 9, 2, 7, 7, 1], 12), random_seed(1, 2, [3, 4]))"
    )
    said = {
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
        for seed in ("0", "1", "77")
    }
    assert len(said) == 1 and next(iter(said)).strip()


def test_every_stream_is_seeded():
    import numpy
    import torch

    from homelab.worker.training import trainer

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    drawn = []
    for noise in (1, 2):
        random.seed(noise), numpy.random.seed(noise), torch.manual_seed(noise)
        trainer._seed(2**55 + 3)
        drawn.append(draw())
    assert drawn[0] == drawn[1]


def test_a_variable_of_a_node_that_changes_numbers_is_dropped(monkeypatch: pytest.MonkeyPatch):
    from homelab.worker.training import train

    odd = {"NVIDIA_TF32_OVERRIDE": "1", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "ACCELERATE_MIXED_PRECISION": "fp16", "FSDP_VERSION": "2"}
    own = {"OMP_NUM_THREADS": "2", "HF_HOME": "/h", "CUDA_VISIBLE_DEVICES": "0", **odd}

    assert train.without_odd_variables(own) == sorted(odd)
    assert own == {"OMP_NUM_THREADS": "2", "HF_HOME": "/h", "CUDA_VISIBLE_DEVICES": "0"}
    assert of_a_node(own) == []
