"""A strategy is one folder of the worker; the plan names it."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import homelab.worker
from homelab.worker.errors import WorkerError

pytest.importorskip("torch")
from homelab.worker.strategies import registry
from tests.worker import harness


def test_a_strategy_that_the_worker_lacks_is_one_clear_error() -> None:
    task: Any = SimpleNamespace(strategy="rings")
    with pytest.raises(WorkerError, match="no strategy 'rings'; it has ddp") as caught:
        registry.strategy_of(task, steps=1)
    assert "[parallel] strategy" in caught.value.where
    assert 'strategy = "auto"' in caught.value.hint


def test_only_one_file_names_torchs_class() -> None:
    """The docstrings of other files may explain it; their code may not know it."""
    root = Path(homelab.worker.__file__).parent
    users = set()
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        if {"DistributedDataParallel", "gradient_compression"} & names:
            users.add(path.relative_to(root).as_posix())
    assert users == {"strategies/ddp/copies.py"}


@pytest.mark.parametrize(("bucket_mb", "given"), [("auto", {}), (25.0, {}), (5.0, {"bucket_cap_mb": 5.0})])
def test_ddp_gets_the_buckets_of_the_recipe(tmp_path: Path, bucket_mb: Any, given: dict[str, float]) -> None:
    """Without a size torch makes its first bucket smaller; accelerate passes on what is not the default."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = SimpleNamespace(ddp_handler=accelerate.DistributedDataParallelKwargs())
    task = harness.task_of(tmp_path, plan={"strategy": "ddp"}, parallel__bucket_mb=bucket_mb)
    registry.strategy_of(task, steps=1).configure(accelerator)
    settings = accelerator.ddp_handler.to_kwargs()
    assert {key: value for key, value in settings.items() if key == "bucket_cap_mb"} == given and settings["init_sync"] is False
