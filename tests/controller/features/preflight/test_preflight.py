"""One look at a cluster: what one part of it cannot do takes nothing from the others."""

from __future__ import annotations

from typing import Any, cast

import pytest

from homelab.controller.checks.evidence import Evidence
from homelab.controller.features.preflight import gather, preflight
from homelab.controller.remote.fanout import Fleet
from tests.controller.checks import healthy


def test_a_collective_test_that_cannot_be_planned_leaves_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = healthy.with_node(healthy.gpu(), "laptop", environment={"NCCL_BUFFSIZE": "2097152"})

    def looked(*_: Any, **__: Any) -> Evidence:
        return seen

    def named(_: Evidence) -> str:
        raise AssertionError("there is no recipe")

    monkeypatch.setattr(gather, "facts", looked)
    monkeypatch.setattr(gather, "with_links", looked)
    found = preflight.look(cast(Fleet, None), None, [], skip=(), test_collective="always", run_name=named)
    assert found.refused is not None and "NCCL_BUFFSIZE differs between tower and laptop" in found.refused.message
    assert {"gpu", "network"} <= {finding.subject for finding in found.findings}
