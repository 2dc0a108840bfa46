"""The ranks start from the same weights, to the last bit, or the error names who does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from homelab.worker import copies, ranks, replicas
from homelab.worker.errors import TrainingError


def test_a_rank_that_starts_from_other_weights_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    other.load_state_dict(model.state_dict())
    said = [replicas.numbers(copies.digest(model)), replicas.numbers(copies.digest(model))]
    monkeypatch.setattr(ranks, "gather", lambda values: [*said, values])
    plan = {"ranks": [{"rank": rank, "node": node} for rank, node in enumerate(("tower", "mini", "laptop"))]}
    task: Any = SimpleNamespace(plan=plan, run_dir=tmp_path, rank=2)
    copies.refuse_unequal(other, task, "step 20")
    with torch.no_grad():
        other.weight[0, 0] = torch.nextafter(other.weight[0, 0], torch.tensor(9.0))  # one bit of one weight
    with pytest.raises(TrainingError) as caught:
        copies.refuse_unequal(other, task, "step 20")
    assert "rank 2" in str(caught.value) and "laptop" in str(caught.value)
