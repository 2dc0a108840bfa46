"""What `homelab bench card` says and writes, and that `homelab bench SUITE.toml` needs no word more than before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from homelab.cli.main import run
from homelab.controller.attempt import card_table
from homelab.controller.base.errors import HomelabError
from homelab.controller.run import store
from homelab.shared.protocol.card_messages import GpuFacts
from homelab.shared.protocol.message import as_json
from tests.controller.checks import healthy
from tests.controller.features.bench.test_card_run import NODE, done, fleet_of

CLUSTER = '[[nodes]]\nname = "tower"\nhost = "192.0.2.1"\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a cluster file of one node, which is a fake."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    for name in ("HOMELAB_CLUSTER", "HOMELAB_RUNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_answer_comes_first_and_the_next_command_last(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet_of(place, done()).replace_connections(monkeypatch)
    assert run(["bench", "card"]) == 0
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert first == "RTX 5070 Ti: 3500 tokens/s (lora in bf16, 2.0 billion random weights, rows of 1024 tokens, 6.4 GB at most)"
    assert second.endswith("of the speed that its data sheet promises") and third.startswith("wrote card-rtx-5070-ti-lora.json: ")
    assert "CONTRIBUTING.md" in last and last.endswith(f"cat card-rtx-5070-ti-lora.json >> {card_table.SHIPPED}")
    assert not isinstance(card_table.parse((place / "card-rtx-5070-ti-lora.json").read_text()), tuple)


def test_json_has_the_row_and_where_it_is(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = healthy.packages(healthy.gpu(names=(NODE,)), NODE, bitsandbytes="0.50.2")
    fleet_of(place, done(), seen=seen).replace_connections(monkeypatch)
    assert run(["bench", "card", "tower", "--method", "qlora", "--output", "mine.json", "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["row"] == json.loads((place / "mine.json").read_text()) and answer["row"]["method"] == "qlora" and answer["of_guess"] > 0
    assert (answer["file"], answer["table"]) == ("mine.json", str(card_table.SHIPPED))


def test_a_row_that_cannot_be_written_is_refused_before_or_shown_after_the_measurement(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "card", "--output", str(place)]) == 2
    assert "this is a folder" in capsys.readouterr().err, "no node was asked"
    fleet_of(place, done()).replace_connections(monkeypatch)
    monkeypatch.setattr(store, "UNWRITTEN", {})

    def full(path: Path, text: str) -> None:
        raise HomelabError("it cannot be written: No space left on device", where=str(path), hint="make room")

    monkeypatch.setattr(store, "write_text", full)
    assert run(["bench", "card"]) == 1
    said = capsys.readouterr()
    assert "3500 tokens/s" in said.out and '"tokens_per_s": 35' in said.out and "wrote" not in said.out and "make room" in said.err


def test_a_name_that_a_node_made_up_is_no_path_and_no_command(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = healthy.gpu(names=(NODE,))
    card: GpuFacts = odd.facts[NODE].gpu.cards[0].replace(name="../../etc/x")
    fleet_of(place, done(), seen=healthy.with_facts(odd, NODE, gpu={"cards": [as_json(card)]})).replace_connections(monkeypatch)
    assert run(["bench", "card"]) == 0
    assert (place / "card-etc-x-lora.json").is_file() and "does not know this card yet" in capsys.readouterr().out
    worse = card.replace(name="x\x1b[31m; touch pwned")
    fleet_of(place, done(), seen=healthy.with_facts(odd, NODE, gpu={"cards": [as_json(worse)]})).replace_connections(monkeypatch)
    assert run(["bench", "card"]) == 1 and "\x1b" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        (["card", "--cluster", "two.toml"], "which node's card? two.toml has tower, laptop", "homelab bench card --cluster two.toml tower"),
        (["card", "towr"], 'no node is called "towr". Did you mean "tower"?', "homelab preflight"), (["card", "--method", "dora"], "'dora' is no method", "--method lora"),
        (["suite.toml"], "there is no suite here", "recipes/bench/"), (["--dry-run", "suite.toml"], "there is no suite here", "recipes/bench/"),
        (["suite", "suite.toml"], "there is no suite here", "recipes/bench/"),
    ],
)  # fmt: skip
def test_what_is_typed_wrongly(place: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str, fix: str) -> None:
    (place / "two.toml").write_text(CLUSTER + '[[nodes]]\nname = "laptop"\nhost = "192.0.2.2"\n')
    assert run(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and fix in said
