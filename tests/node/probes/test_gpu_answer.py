"""torch is asked about the cards once: a second context on a card that trains would take its memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.checks.gpu import torch_build
from homelab.controller.facts.node import Facts
from homelab.node import facts
from homelab.node.probes import gpu, gpu_answer
from homelab.node.system import processes
from tests.controller.checks import fake_gpu, healthy

MIB = 1 << 20


class Torch:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.works = True

    def __call__(self, layer: str | None) -> Any:
        self.asked.append(layer)
        return {"devices": [{"name": "A", "matmul_ok": self.works, f"{layer}_ok": True}]}


@pytest.fixture
def request_(tmp_path: Path) -> dict[str, Any]:
    return {"workdir": str(tmp_path / "w"), "node": "n", "method": {"kind": "lora"}}


TOLD: dict[str, Any] = {"driver_version": "575", "cards": [{"uuid": "GPU-1", "holders": [], "memory_used_bytes": 9 * MIB}]}
QLORA = {"method": {"kind": "qlora"}}


def test_it_is_asked_once(request_: dict[str, Any]) -> None:
    torch = Torch()
    first = gpu_answer.answer(request_, TOLD, "?", torch)
    assert gpu_answer.answer(request_, TOLD, "?", torch) == first and torch.asked == [None]
    gpu_answer.answer({**request_, **QLORA}, TOLD, "?", torch)
    assert torch.asked == [None, "four_bit"], "whether 4-bit layers work was not asked"
    gpu_answer.answer({**request_, **QLORA}, TOLD, "?", torch)
    gpu_answer.answer(request_, TOLD, "?", torch)
    assert torch.asked == [None, "four_bit"]
    gpu_answer.answer({**request_, "method": {"kind": "lora", "base": "8bit"}}, TOLD, "?", torch)
    assert torch.asked == [None, "four_bit", "eight_bit"]


@pytest.mark.parametrize("what", ["driver", "cards", "question", "boot", "sleep", "xid", "torch", "hiding", "damaged", "failed"])
def test_it_is_asked_again_when_something_has_changed(
    request_: dict[str, Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('nobody imports it here')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    torch, told, question = Torch(), copy.deepcopy(TOLD), "?"
    torch.works = what != "failed"
    gpu_answer.answer(request_, told, question, torch)
    if what == "driver":
        told["driver_version"] = "580"
    elif what == "cards":
        told["cards"][0]["uuid"] = "GPU-2"
    elif what == "question":
        question = "another"
    elif what == "boot":
        (tmp_path / "boot").write_text("of today\n")
        monkeypatch.setattr(gpu_answer, "_BOOT", str(tmp_path / "boot"))
    elif what == "sleep":
        (tmp_path / "success").write_text("3\n")
        monkeypatch.setattr(gpu_answer, "_SUSPENDS", str(tmp_path / "success"))
    elif what == "xid":
        request_ = {**request_, "facts": {"xid": [{"code": 79, "bus_id": "0000:01:00", "count": 1, "last_s_ago": 9.0, "program": None}]}}
    elif what == "torch":
        (package / "__init__.py").write_text("raise ImportError('another one')")
    elif what == "hiding":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    elif what == "damaged":
        (tmp_path / "w" / "gpu.json").write_text("[1")
    gpu_answer.answer(request_, told, question, torch)
    assert len(torch.asked) == 2


def test_a_report_that_grows_older_is_no_news(request_: dict[str, Any]) -> None:
    torch = Torch()
    for ago in (9.0, 99.0):
        report = {"code": 31, "bus_id": "0000:01:00", "count": 2, "last_s_ago": ago, "program": "python"}
        gpu_answer.answer({**request_, "facts": {"xid": [report]}}, TOLD, "?", torch)
    assert torch.asked == [None]


def test_a_new_error_report_of_the_driver_has_torch_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    fake_gpu.nvidia_smi(tmp_path / "bin", fake_gpu.reply("nvidia-smi-575-rtx5070ti.xml"))
    monkeypatch.setattr(facts, "PROBES", tuple(name for name in facts.PROBES if name in ("gpu", "xid")))
    asked = []
    monkeypatch.setattr(
        gpu, "_gpu_probe", lambda cards, layer: asked.append(layer) or {"devices": [{"matmul_ok": True, "capability": [12, 0]}]}
    )
    for lines in (0, 0, 1):
        log = "".join(f"[{number}.5] NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n" for number in range(lines))
        (tmp_path / "log").write_text(log)
        (tmp_path / "bin" / "dmesg").write_text(f"#!/bin/sh\ncat {tmp_path / 'log'}\n")
        (tmp_path / "bin" / "dmesg").chmod(0o755)
        answer = facts.collect({"workdir": str(tmp_path), "node": "n"})
        assert not answer["broken"] and len(answer["xid"]) == lines
    assert len(asked) == 2


def test_nobody_asks_where_a_run_of_ours_computes(request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch, busy = Torch(), copy.deepcopy(TOLD)
    busy["cards"][0]["holders"] = [{"pid": 7, "run": "r-1"}, {"pid": 8, "run": None}]
    assert gpu_answer.answer(request_, busy, "?", torch) == {"not_asked": ["r-1"]} and torch.asked == []
    known = gpu_answer.answer(request_, TOLD, "?", torch)
    assert gpu_answer.answer(request_, busy, "?", torch) == known, "what was said before still holds"

    unnamed = copy.deepcopy(TOLD)  # a container: nvidia-smi names no process
    unnamed["cards"][0].update(memory_used_bytes=5000 * MIB, uuid="GPU-2")
    monkeypatch.setattr(processes, "of_runs", lambda workdir, node: {"r-2": [9]})
    assert gpu_answer.answer(request_, unnamed, "?", torch) == {"not_asked": ["r-2"]} and len(torch.asked) == 1
    unnamed["cards"][0]["memory_used_bytes"] = 9 * MIB
    assert "devices" in gpu_answer.answer(request_, unnamed, "?", torch), "an idle card may be asked"


def test_a_folder_that_cannot_be_written_costs_a_question(request_: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "w").write_text("a file")
    torch = Torch()
    for _ in range(2):
        assert gpu_answer.answer(request_, TOLD, "?", torch)["devices"]
    assert len(torch.asked) == 2


def test_the_facts_come_from_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    fake_gpu.nvidia_smi(tmp_path / "bin", fake_gpu.reply("nvidia-smi-575-rtx5070ti.xml"))
    calls = []

    def asked(cards: list[dict[str, Any]], layer: str | None) -> Any:
        calls.append(layer)
        return {"cuda_available": True, "devices": [{"name": "A", "capability": [12, 0], "matmul_ok": True}]}

    monkeypatch.setattr(gpu, "_gpu_probe", asked)
    answers = [gpu.read({"workdir": str(tmp_path), "node": "n"}) for _ in range(2)]
    assert len(calls) == 1 and answers[0] == answers[1]
    assert answers[1]["cards"][0]["compute_capability"] == "12.0"


def test_cards_that_are_not_asked_are_no_finding() -> None:
    evidence = healthy.with_facts(healthy.gpu(), "tower", gpu={"torch": {"not_asked": ["r-1"]}})
    facts: Facts = evidence.facts["tower"]
    assert list(torch_build.first_cause(evidence.recipe, evidence.cluster.node("tower"), facts)) == []
    facts = healthy.changed(facts, gpu={"torch": None})
    assert list(torch_build.first_cause(evidence.recipe, evidence.cluster.node("tower"), facts))
