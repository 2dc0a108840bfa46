"""`homelab bench card` on a real node: a row of its processor, nothing left there, also after Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from homelab.controller.attempt import card_table
from homelab.controller.planning.speed.measured_cards import MeasuredCard
from scripts.practice.desk import Desk, left_on, read_rest, read_until, wait_until, wait_until_none_left

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.thorough, pytest.mark.timeout(300)]


def folders(desk: Desk) -> list[str]:
    """What short jobs have left on the nodes."""
    return [str(path) for node in desk.lab.nodes for path in Path(node.workdir).glob("collective/card-*")]


def test_one_node_measured_and_its_row_written(desk: Desk) -> None:
    done: subprocess.CompletedProcess[str] = desk.homelab("bench", "card", "node2", "--output", "row.json", timeout_s=200)
    first, *_, last = done.stdout.splitlines()
    assert (
        first.startswith("CPU, ")
        and "tokens/s (lora in fp32" in first
        and last.endswith("Next: homelab launch RECIPE (its first steps measure this machine)")
    )
    assert ". training, step" in done.stderr
    text = (desk.folder / "row.json").read_text()
    row = MeasuredCard.model_validate_json(text)
    assert row.tokens_per_s > 0 and row.peak_bytes and "node2" not in text and str(desk.folder) not in text
    assert card_table.parse(json.dumps(json.loads(text))) == (
        "card",
        f'homelab has no data sheet of "{row.card}": add it to homelab/controller/base/data_sheets.py first',
    )
    wait_until_none_left(desk.lab)
    assert not folders(desk)


def test_ctrl_c_leaves_nothing_on_the_node(desk: Desk) -> None:
    process = desk.spawn("bench", "card", "node1")
    read_until(process, "training")
    process.send_signal(signal.SIGINT)
    assert "interrupted" in read_rest(process) and process.returncode == 130
    wait_until(lambda: not left_on(desk.lab) and not folders(desk), 20)


def test_which_node_is_asked_where_there_are_several(desk: Desk) -> None:
    assert "which node's card? " in desk.homelab("bench", "card", code=2).stderr
    assert "'dora' is no method" in desk.homelab("bench", "card", "node1", "--method", "dora", code=2).stderr
