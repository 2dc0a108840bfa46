"""The plan says whether a rank computes on a card: torch may see one that the plan leaves alone."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import homelab.worker
from homelab.worker.checkpoints import tensor_files

WORKER = Path(homelab.worker.__file__).parent
# process_group: the plan wants a card, and torch may see none. collective_check: its backend is the plan's. The chats take what is free beside a run.
# waiting_rank: nothing has taken one.
ASKS = {"runtime/process_group.py", "tools/collective_check.py", "runtime/waiting_rank.py", "tools/chat.py", "tools/stage_chat.py"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_copy_of_the_state_touches_only_the_plan_s_card(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """CUDA makes a context, of some 500 MB on the card, for the first call that needs one."""
    waited: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(None))
    state: dict[str, Any] = {"weights": {"a": torch.ones(3)}, "curve": "1,2"}
    copied = tensor_files.copy_of(state, device)
    assert len(waited) == (device == "cuda")
    assert (
        torch.equal(copied["weights"]["a"], state["weights"]["a"]) and copied["weights"]["a"].data_ptr() != state["weights"]["a"].data_ptr()
    )


def test_nothing_of_a_training_asks_torch_for_cards() -> None:
    asking = {
        str(file.relative_to(WORKER))
        for file in WORKER.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in ("is_available", "device_count", "is_initialized")
        and "cuda" in ast.unparse(node.value)
    }
    assert asking == ASKS
