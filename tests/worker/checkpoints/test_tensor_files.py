"""A file of tensors says nothing of the device that they were on: nodes compare the files of a step."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from homelab.worker.checkpoints import tensor_files


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps", "hpu"])
def test_a_state_saved_from_a_card_is_the_file_of_its_copy_in_host_memory(kind: str) -> None:
    """One H200 wrote "cuda:0" into the optimizer's file of a save without a copy, and its digest was another one."""
    storage: Any = SimpleNamespace(device=SimpleNamespace(type=kind, index=1))
    assert torch.serialization.location_tag(storage) == "cpu" == torch.serialization.location_tag(torch.ones(1).untyped_storage())


def test_what_the_host_holds_is_saved_as_before() -> None:
    file = io.BytesIO()
    torch.save({"step": torch.arange(3)}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["step"].tolist() == [0, 1, 2]
    assert tensor_files.host_tag(torch.ones(1, device="meta").untyped_storage()) is None


def test_what_a_library_has_hung_on_a_tensor_is_not_saved(tmp_path: Path) -> None:
    """bitsandbytes says of a paged state that it is one, and of which card (functional.py, get_paged)."""
    state: Any = {"optimizer.pt": {"state": {0: {"exp_avg": torch.ones(4), "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}}
    state["optimizer.pt"]["state"][0]["exp_avg"].is_paged = True
    state["optimizer.pt"]["state"][0]["exp_avg"].page_deviceid = 1
    files = {"as it is": state, "copied": tensor_files.copy_of(state, "cpu")}
    for name, content in files.items():
        (tmp_path / name).mkdir()
        tensor_files.writers_of(content)["optimizer.pt"](tmp_path / name / "optimizer.pt")
    assert (tmp_path / "as it is/optimizer.pt").read_bytes() == (tmp_path / "copied/optimizer.pt").read_bytes()
    assert torch.load(tmp_path / "copied/optimizer.pt", weights_only=True)["state"][0]["exp_avg"].tolist() == [1.0] * 4
