"""A recovery that an error proposes is the one that was asked for, and a little more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from homelab.cli.main import run
from homelab.controller.attempt import preconditions
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.features.recover import recover_run

pytestmark = pytest.mark.timeout(60)
OTHERS = HomelabError("node1 is with its owner", where="run", hint=Hint("without it: {}", homelab("recover run --nodes", "node2")))
ELSE = HomelabError("no", where="run", hint=Hint("look first: {}", homelab("status", "run")))


@pytest.mark.parametrize(
    ("typed", "error", "said"),
    [
        ([], None, "homelab recover{} run --from-scratch"),
        (["--nodes", "node1"], None, "homelab recover{} --nodes node1 run --from-scratch"),
        (["--nodes", "node1,node2", "--strategy", "zero2", "--skip", "clock", "--skip", "power"], None,
         "homelab recover{} --nodes node1,node2 --strategy zero2 --skip clock --skip power run --from-scratch"),
        (["--nodes", "node1"], OTHERS, "homelab recover{} run --nodes node2"),
        (["--from-scratch"], OTHERS, "homelab recover{} --from-scratch run --nodes node2"),
        (["--from-scratch"], None, "homelab recover{} run --from-scratch"),
        (["--nodes", "node1"], ELSE, "homelab status{} run"),
    ],
)  # fmt: skip
def test_it_keeps_what_was_typed(
    typed: list[str],
    error: HomelabError | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("".join(f'[[nodes]]\nname = "{name}"\nhost = "127.0.0.{name[-1]}"\n' for name in ("node1", "node2")))
    raised = error or preconditions.no_checkpoint("run", {"node1": {"bad": {}}}, {})

    def refused(*_given: Any) -> None:
        raise type(raised)(raised.message, where=raised.where, hint=raised.hint)

    monkeypatch.setattr(recover_run, "recover_run", refused)
    assert run(["recover", "run", "--cluster", str(cluster), *typed]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    before, after = said.split("{}")
    assert before in shown and shown.endswith(after), shown
