"""What cards use: added up from samples, and never a number for what was not measured."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest

from homelab.controller.remote import answers
from homelab.node import verbs
from homelab.node.run import energy_meter
from homelab.node.run.energy_meter import Meter, Totals, parse
from homelab.shared.protocol.message import as_json
from homelab.shared.protocol.run_messages import CardJoules

ANSWER = "0, GPU-a, NVIDIA GeForce RTX 3060, 100.00\n1, GPU-b, Quadro K620, [N/A]\n"


def test_joules_are_the_area_under_the_samples() -> None:
    totals = Totals()
    for at_s, watts in ((0.0, 100.0), (10.0, 200.0), (20.0, 200.0)):
        totals.add([(0, "GPU-a", "3060", watts)], at_s)
    assert totals.cards["GPU-a"] == CardJoules(index=0, uuid="GPU-a", name="3060", joules=3500.0, measured_s=20.0)


def test_a_gap_is_not_filled_and_a_card_that_does_not_tell_has_none() -> None:
    totals = Totals()
    for at_s, watts in ((0.0, 100.0), (10.0, 100.0), (3610.0, 100.0), (3620.0, 100.0)):  # the laptop slept for an hour
        totals.add([(0, "GPU-a", "3060", watts), (1, "GPU-b", "K620", None)], at_s)
    a, b = totals.cards["GPU-a"], totals.cards["GPU-b"]
    assert (a.joules, a.measured_s, a.unmeasured_s) == (2000.0, 20.0, 3600.0)
    assert (b.joules, b.measured_s, b.unmeasured_s) == (None, 0.0, 3620.0)


def test_a_clock_that_was_set_back() -> None:
    totals = Totals()
    totals.add([(0, "GPU-a", "3060", 100.0)], 50.0)
    totals.add([(0, "GPU-a", "3060", 100.0)], 70.0)
    totals.add([(0, "GPU-a", "3060", 100.0)], 10.0)
    card = totals.cards["GPU-a"]
    assert (card.joules, card.measured_s, card.unmeasured_s) == (2000.0, 20.0, 0.0)


def test_lines_of_the_driver() -> None:
    assert parse(ANSWER) == [(0, "GPU-a", "NVIDIA GeForce RTX 3060", 100.0), (1, "GPU-b", "Quadro K620", None)]
    assert parse("No devices were found\n0, x\n2, GPU-c, A, nan\n3, GPU-d, A, -5\n") == [(2, "GPU-c", "A", None), (3, "GPU-d", "A", None)]


def put_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_an_attempt_has_its_energy_and_the_controller_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_meter, "EVERY_S", 0.05)
    put_smi(tmp_path / "bin", monkeypatch, f"[ \"$1\" = --query-gpu=index,uuid,name,power.draw ] || exit 9\nprintf '%s' '{ANSWER}'")
    node_dir = tmp_path / "runs" / "2026-01-01-0000-x" / "attempts" / "1" / "nodes" / "tower"
    node_dir.mkdir(parents=True)
    (node_dir / "start.json").write_text("{}")
    (node_dir.parents[1] / "plan.json").write_text('{"ranks": []}')
    with Meter(str(node_dir)):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not (node_dir / "energy.json").exists():
            time.sleep(0.01)
        time.sleep(0.2)
    answer = as_json(verbs.call("energies", {"workdir": str(tmp_path), "run": "2026-01-01-0000-x", "node": "tower"}, None, None))  # type: ignore[arg-type]
    assert answers.fault("energies", answer) is None
    first, second = answer["attempts"]["1"]
    assert first["joules"] == pytest.approx(100 * first["measured_s"], rel=1e-6) and first["measured_s"] > 0
    assert second["joules"] is None and second["unmeasured_s"] > 0


def test_a_driver_that_hangs_is_asked_once_more_and_then_the_time_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question that hangs would leave a process that nobody can end."""
    monkeypatch.setattr(energy_meter, "EVERY_S", 0.05)
    monkeypatch.setattr(energy_meter, "_ANSWER_S", 0.5)
    asked = tmp_path / "asked"
    put_smi(tmp_path / "bin", monkeypatch, f"echo x >> {asked}\n[ $(wc -l < {asked}) -lt 3 ] || exec sleep 60\nprintf '%s' '{ANSWER}'")
    with Meter(str(tmp_path)):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not (asked.exists() and len(asked.read_text().split()) >= 3):
            time.sleep(0.01)
        time.sleep(1.5)
    assert len(asked.read_text().split()) == 3
    first = json.loads((tmp_path / "energy.json").read_text())["cards"][0]
    assert first["joules"] == pytest.approx(100 * first["measured_s"]) and first["unmeasured_s"] > 1


@pytest.mark.parametrize("script", ["exit 9", "echo No devices were found", "echo 0"])
def test_a_driver_that_does_not_answer_is_not_asked_for_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    put_smi(tmp_path / "bin", monkeypatch, script)
    with Meter(str(tmp_path)) as meter:
        meter._thread.join(20)
        assert not meter._thread.is_alive()
    assert not (tmp_path / "energy.json").exists()


def test_a_hostile_node_is_refused() -> None:
    for cards in ([{"index": 0, "joules": "1"}] * 65, [{"index": 0, "joules": -1}], "x"):
        assert answers.fault("energies", {"attempts": {"1": cards}}) is not None
    assert answers.fault("energies", json.loads('{"attempts": {"../x": []}}')) is not None
