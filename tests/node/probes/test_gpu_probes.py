"""What the agent makes of the answers of nvidia-smi, the kernel log, ROCm and torch, and of programs that fail or hang."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Finding
from homelab.controller.facts.node import Facts
from homelab.controller.facts.reading import read
from homelab.node.probes import amd, gpu, holders, nvidia, nvlink, xid
from homelab.node.system import processes, programs, utilisation
from homelab.shared.protocol.card_messages import GpuFacts
from homelab.shared.protocol.message import as_json, defaults
from tests.controller.checks import fake_gpu, healthy
from tests.controller.checks.fake_gpu import REPLIES, reply
from tests.processes import living

pytestmark = pytest.mark.timeout(30)
MIB = 1 << 20
XML = sorted(path.name for path in REPLIES.glob("nvidia-smi-*.xml"))
ERRORS = sorted(path.name for path in REPLIES.glob("nvidia-smi-*.txt"))


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, first on PATH; no other nvidia-smi is found."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(programs, "_ELSEWHERE", [])
    return tmp_path / "bin"


def card(name: str, number: int = 0) -> dict[str, Any]:
    """One card of a recorded reply."""
    found: dict[str, Any] = nvidia.parse(reply(name))["cards"][number]
    return found


def test_a_driver_that_hangs_is_not_asked_again_and_again(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No signal ends what hangs there, and an open dashboard asks every few seconds."""
    bin_folder.mkdir()
    program, asked = bin_folder / "nvidia-smi", bin_folder / "asked"
    program.write_text(f"#!/bin/sh\necho >> {asked}\necho said\nread line || exit 0\n")
    program.chmod(0o755)
    state = processes.state
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stuck:
        assert stuck.stdin is not None and stuck.stdout is not None and stuck.stdout.readline() == b"said\n"
        monkeypatch.setattr(processes, "state", lambda pid: "D" if pid == stuck.pid and state(pid) else state(pid))
        assert utilisation.gpus() == ("ok", []) and asked.read_text() == "\n" * 2, "every program waits in the kernel for a moment"
        monkeypatch.setattr(processes, "HUNG_S", -1.0)
        assert utilisation.gpus()[1] == [] and not nvidia.ask()["cards"] and asked.read_text() == "\n" * 2
        stuck.stdin.close()
    assert utilisation.gpus() == ("ok", []) and asked.read_text() == "\n" * 3, "the driver has come back"


@pytest.mark.parametrize("name", XML)
def test_every_recorded_reply_is_read_and_fits_the_facts(name: str) -> None:
    answer = nvidia.parse(reply(name))
    assert answer["driver_version"].startswith(name.split("-")[2])
    assert len(answer["cards"]) == reply(name).count("<gpu id=")
    facts = Facts.model_validate({"node": "tower", "gpu": answer})
    assert [entry.index for entry in facts.gpu.cards] == list(range(len(facts.gpu.cards)))
    assert set(answer["cards"][0]) <= set(defaults(GpuFacts)), "a field that nobody would see"


def test_one_card_in_full() -> None:
    answer = nvidia.parse(reply("nvidia-smi-575-rtx5070ti.xml"))
    assert (answer["nvidia_smi"], answer["driver_version"], answer["driver_cuda"]) == ("ok", "575.64.03", "12.9")
    assert answer["cards"] == [
        {
            "index": 0, "name": "NVIDIA GeForce RTX 5070 Ti", "uuid": "GPU-55555555-5555-5555-5555-555555555555", "bus_id": "00000000:01:00.0",
            "memory_total_bytes": 16303 * MIB, "memory_used_bytes": 2 * MIB,
            "memory_reserved_bytes": 441 * MIB, "memory_free_bytes": 15860 * MIB, "temperature_c": 33.0, "utilization_percent": 0.0,
            "power_w": 9.8, "power_limit_w": 300.0, "power_limit_default_w": 300.0, "slowed_by": ["gpu_idle"],
            "pcie_generation": 4, "pcie_width": 16, "pcie_width_max": 16, "compute_mode": "Default", "mig": False, "mig_bytes": [], "mig_free_bytes": [], "recovery_action": None,
            "errors_now": None, "errors_ever": None, "errors_mended": 0, "repair_pending": False, "repair_failed": False, "holders": [],
        }
    ]  # fmt: skip


@pytest.mark.parametrize("name", XML)
def test_free_is_what_nvidia_smi_calls_so_and_what_is_left_without_the_drivers_part(name: str) -> None:
    for entry in nvidia.parse(reply(name))["cards"]:
        told = read(GpuFacts, entry)
        silent = read(GpuFacts, {**entry, "memory_free_bytes": None})
        assert told.free_bytes == entry["memory_free_bytes"]
        if told.free_bytes is not None:
            assert silent.free_bytes is not None and abs(silent.free_bytes - told.free_bytes) <= MIB


def test_what_drivers_call_by_other_names() -> None:
    old = card("nvidia-smi-470-power-brake.xml")
    assert old["slowed_by"] == ["hw_slowdown", "hw_power_brake_slowdown"]
    assert (old["power_w"], old["power_limit_w"], old["power_limit_default_w"]) == (17.9, 290.0, 290.0)
    assert card("nvidia-smi-550-thermal.xml")["slowed_by"] == ["hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown"]
    laptop = card("nvidia-smi-570-rtx4070-laptop.xml")
    assert (laptop["power_w"], laptop["power_limit_w"], laptop["power_limit_default_w"]) == (3.1, 80.0, 55.0)
    assert card("nvidia-smi-575-reset.xml")["recovery_action"] == "Reset"
    before = reply("nvidia-smi-535-t4-errors.xml").replace("<reset_required>No<", "<reset_required>Yes<")
    assert nvidia.parse(before)["cards"][0]["recovery_action"] == "Reset"


@pytest.mark.parametrize(
    ("name", "now", "ever", "mended", "pending", "failed"),
    [
        ("nvidia-smi-418-p4.xml", 3, 3, 1, True, False),
        ("nvidia-smi-535-t4-errors.xml", 2, 2, 0, False, False),
        ("nvidia-smi-535-t4-pending.xml", 0, 1, 0, True, False),
        ("nvidia-smi-550-a100-remapped.xml", 0, 1, 1, False, False),
        ("nvidia-smi-550-a100-remap-failed.xml", 0, 513, 512, False, True),
    ],
)
def test_memory_errors_as_each_driver_counts_them(name: str, now: int, ever: int, mended: int, pending: bool, failed: bool) -> None:
    found = card(name)
    assert (found["errors_now"], found["errors_ever"], found["errors_mended"]) == (now, ever, mended)
    assert (found["repair_pending"], found["repair_failed"]) == (pending, failed)


def test_parity_and_secded_errors_are_added() -> None:
    text = reply("nvidia-smi-550-a100-remapped.xml")
    for kind, count in (("parity", 2), ("secded", 3)):
        text = text.replace(f"<sram_uncorrectable_{kind}>0<", f"<sram_uncorrectable_{kind}>{count}<", 1)
    assert nvidia.parse(text)["cards"][0]["errors_now"] == 5


def test_many_cards_and_their_lanes() -> None:
    first, second = nvidia.parse(reply("nvidia-smi-550-two-rtx4090.xml"))["cards"]
    assert [(entry["index"], entry["bus_id"], entry["pcie_width"], entry["pcie_width_max"]) for entry in (first, second)] == [
        (0, "00000000:01:00.0", 16, 16),
        (1, "00000000:0A:00.0", 4, 16),
    ]


def test_mig_instances() -> None:
    found = card("nvidia-smi-535-a100-mig.xml")
    assert found["mig"] and found["mig_bytes"] == [20096 * MIB, 20096 * MIB] and found["mig_free_bytes"] == [20059 * MIB] * 2
    assert found["memory_total_bytes"] == 40960 * MIB and found["utilization_percent"] is None
    assert not card("nvidia-smi-550-a100-remapped.xml")["mig"]


@pytest.mark.parametrize("name", ["nvidia-smi-580-gb10.xml", "nvidia-smi-535-unknown-error.xml"])
def test_what_a_card_does_not_tell_is_none(name: str) -> None:
    found = card(name)
    for key in (
        "memory_total_bytes",
        "memory_used_bytes",
        "memory_reserved_bytes",
        "memory_free_bytes",
        "power_limit_w",
        "power_limit_default_w",
        "errors_now",
    ):
        assert found[key] is None, key


@pytest.mark.parametrize(
    "text",
    ["N/A", "[N/A]", "[Unknown Error]", "Requested functionality has been deprecated", "", "9" * 400 + " W", "nan", "inf W", "W 300"],
)
def test_a_figure_that_is_none_is_none_and_the_rest_of_the_card_is_there(text: str) -> None:
    whole = reply("nvidia-smi-575-rtx5070ti.xml")
    for tag in ("current_power_limit", "default_power_limit", "power_limit", "enforced_power_limit", "total"):
        whole = re.sub(rf"<{tag}>[^<]*</{tag}>", f"<{tag}>{text}</{tag}>", whole)
    (entry,) = nvidia.parse(whole)["cards"]
    assert (entry["power_limit_w"], entry["power_limit_default_w"], entry["memory_total_bytes"]) == (None, None, None)
    assert entry["name"] == "NVIDIA GeForce RTX 5070 Ti" and entry["memory_used_bytes"] == 2 * MIB
    Facts.model_validate({"node": "tower", "gpu": nvidia.parse(whole)})


def test_a_driver_that_knows_no_field_still_names_its_card() -> None:
    card = "<product_name>NVIDIA GeForce RTX 3090</product_name><fb_memory_usage><total>-5 MiB</total></fb_memory_usage>"
    answer = nvidia.parse(f"<nvidia_smi_log><gpu>{card}</gpu></nvidia_smi_log>")
    found = Facts.model_validate({"node": "tower", "gpu": answer}).gpu.cards[0]
    told = {
        "index",
        "name",
        "errors_mended",
        "mig",
        "repair_pending",
        "repair_failed",
        "slowed_by",
        "mig_bytes",
        "mig_free_bytes",
        "holders",
    }
    assert found.name == "NVIDIA GeForce RTX 3090" and found.free_bytes is None
    assert {key: value for key, value in as_json(found).items() if key not in told and value is not None} == {}


@pytest.mark.parametrize("text", ["", "a recorded answer", "<nvidia_smi_log><gpu>", "<nvidia_smi_log"])
def test_what_is_not_the_xml_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"XML|nvidia_smi_log"):
        nvidia.parse(text)


def test_an_answer_with_nothing_in_it_and_a_banner_before_it() -> None:
    text = 'welcome\n<?xml version="1.0" ?>\n<nvidia_smi_log><gpu id="0"/><gpu/></nvidia_smi_log>\nbye\n'
    answer = nvidia.parse(text)
    assert [entry["name"] for entry in answer["cards"]] == ["a card without a name"] * 2
    assert answer["driver_version"] is None
    Facts.model_validate({"node": "tower", "gpu": answer})


def test_facts_and_polls_ask_only_what_the_fake_program_knows(bin_folder: Path) -> None:
    path = fake_gpu.nvidia_smi(bin_folder, reply("nvidia-smi-550-two-rtx4090.xml"), compute_capability="8.9")
    assert nvidia.ask()["driver_version"] == "550.163.01"
    state, cards = utilisation.gpus()
    assert state == "ok" and [entry["power_w"] for entry in cards] == [14.2, 15.0]
    assert cards[0]["compute_capability"] == "8.9"
    assert {key: value for key, value in nvidia.ask()["cards"][1].items() if key in cards[1]} == {
        key: value for key, value in cards[1].items() if key != "compute_capability"
    }
    assert subprocess.run([path, "-L"], capture_output=True).returncode == 2


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_nvidia_smi_is_kept_in_its_words(name: str, bin_folder: Path) -> None:
    fake_gpu.failing_nvidia_smi(bin_folder, reply(name), 9)
    answer = gpu.read({})
    assert answer["nvidia_smi"] == reply(name).strip() and answer["cards"] == []
    assert utilisation.gpus() == (reply(name).strip(), [])


def test_a_program_that_hangs_is_left_after_its_time(bin_folder: Path) -> None:
    bin_folder.mkdir()
    path = bin_folder / "nvidia-smi"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    begin = time.monotonic()
    assert nvidia.ask(timeout_s=0.3)["nvidia_smi"] == "nvidia-smi did not answer within 0 s"
    assert utilisation.gpus(timeout_s=0.3)[1] == []
    assert time.monotonic() - begin < 5


def test_no_program_is_no_error_and_starts_nothing(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert gpu.read({})["nvidia_smi"] == "missing" and utilisation.gpus() == ("missing", [])
    assert xid.read({}) is None


def test_broken_xml_falls_back_on_the_csv_question(bin_folder: Path) -> None:
    fake_gpu.program(bin_folder, "nvidia-smi", {fake_gpu.FACTS: "<nvidia_smi_log>", fake_gpu.POLL: reply("nvidia-smi-550-query.csv")})
    answer = nvidia.ask()
    assert answer["nvidia_smi"] == "ok" and answer["driver_version"] is None
    assert [entry["memory_used_bytes"] for entry in answer["cards"]] == [4 * MIB, 18322 * MIB]


def test_drivers_that_do_not_know_the_compute_capability_are_asked_again(bin_folder: Path) -> None:
    """Field names of 470: one unknown name makes nvidia-smi refuse the whole question."""
    bin_folder.mkdir()
    path = bin_folder / "nvidia-smi"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *compute_cap*) cat {REPLIES}/nvidia-smi-470-query-refused.txt; exit 2 ;; esac\n'
        f"cat {REPLIES}/nvidia-smi-470-query.csv\n"
    )
    path.chmod(0o755)
    state, cards = utilisation.gpus()
    assert state == "ok"
    assert [(entry["name"], entry["memory_total_bytes"], entry["compute_capability"]) for entry in cards] == [
        ("NVIDIA GeForce RTX 3070 Ti", 8192 * MIB, None)
    ]


def test_the_csv_answer_of_a_card_without_memory_figures() -> None:
    (found,) = utilisation.parse_gpus(reply("nvidia-smi-580-gb10-query.csv"))
    assert (found["name"], found["memory_total_bytes"], found["compute_capability"]) == ("NVIDIA GB10", None, "12.1")


def test_holders_are_named_as_far_as_proc_says(bin_folder: Path) -> None:
    with living("train.py", HOMELAB_RUN="2026-demo") as sleeper:
        xml = fake_gpu.held(
            reply("nvidia-smi-550-busy.xml"),
            [(sleeper.pid, "C", "python", 4000), (sleeper.pid, "G", "python", 3900), (2**30, "C", "/opt/app/bin/gone --serve", 1000)],
        )
        fake_gpu.nvidia_smi(bin_folder, xml)
        (found,) = nvidia.ask()["cards"]
        first, second = holders.named(found["holders"])
    assert (first["run"], first["ours"], first["type"], first["memory_bytes"]) == ("2026-demo", True, "C+G", 4000 * MIB)
    assert first["user"] and first["program"] == Path(sys.executable).name
    assert second == {"pid": 2**30, "program": "gone", "memory_bytes": 1000 * MIB, "type": "C", "user": None, "ours": False, "run": None}


def test_holders_whose_memory_or_id_is_not_told() -> None:
    (found,) = holders.named([{"pid": None, "program": "", "memory_bytes": None, "type": "C"}])
    assert (found["user"], found["memory_bytes"], found["program"]) == (None, None, "")


@pytest.mark.parametrize("four_bit_error", ["", "no binary"])
def test_torch_is_asked_about_every_card(tmp_path: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch, four_bit_error: str) -> None:
    fake_gpu.torch(tmp_path / "site", [("RTX 4090", (8, 9)), ("Tesla T4", (7, 5))], four_bit_error=four_bit_error)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    fake_gpu.nvidia_smi(bin_folder, reply("nvidia-smi-550-two-rtx4090.xml"))
    answer = gpu.read({"method": {"kind": "qlora"}})
    devices = answer["torch"]["devices"]
    assert [(device["matmul_ok"], device["bf16"], device["four_bit_ok"]) for device in devices] == [
        (True, True, not four_bit_error),
        (True, False, not four_bit_error),
    ]
    assert devices[0]["four_bit_error"] == (four_bit_error or None)
    assert [entry["compute_capability"] for entry in answer["cards"]] == ["8.9", "7.5"]
    device = gpu.read({"method": {"kind": "lora"}})["torch"]["devices"][0]
    assert device["four_bit_ok"] is None and device["eight_bit_ok"] is None
    device = gpu.read({"method": {"kind": "lora", "base": "8bit"}})["torch"]["devices"][0]
    assert (device["four_bit_ok"], device["eight_bit_ok"], device["eight_bit_error"]) == (None, not four_bit_error, four_bit_error or None)


def test_torch_that_fails_or_is_not_there(tmp_path: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    fake_gpu.nvidia_smi(bin_folder, reply("nvidia-smi-550-two-rtx4090.xml"))
    fake_gpu.torch(tmp_path / "site", [("RTX 4090", (8, 9))], error="CUDA error: no kernel image\nmore")
    (device,) = gpu.read({})["torch"]["devices"]
    assert (device["matmul_ok"], device["error"]) == (False, "CUDA error: no kernel image")
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise ImportError('libcudart')")
    assert gpu.read({})["torch"] is None


def test_from_the_programs_to_the_findings(tmp_path: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy card gives no finding at all; the same card held by a run of ours gives the command that stops the run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    fake_gpu.torch(tmp_path / "site", [("NVIDIA GeForce RTX 5070 Ti", (12, 0))])
    xml = reply("nvidia-smi-575-rtx5070ti.xml")
    request = {"method": {"kind": "qlora"}}

    def found() -> list[Finding]:
        facts = {"gpu": gpu.read(request), "amd": amd.read(request), "xid": xid.read(request)}
        evidence = healthy.with_facts(healthy.gpu(healthy.recipe(method={"kind": "qlora"})), "tower", **facts)
        return [finding for check in registry.subject("gpu").checks for finding in check.judge(evidence)]

    fake_gpu.nvidia_smi(bin_folder, xml)
    fake_gpu.program(bin_folder, "dmesg", {"": ""})
    assert found() == []
    with living(HOMELAB_RUN="2026-demo") as sleeper:
        fake_gpu.nvidia_smi(bin_folder, fake_gpu.held(xml, [(sleeper.pid, "C", "python", 9000)]))
        (finding,) = found()
    assert (finding.check, finding.node, finding.level, finding.fix) == ("gpu.memory", "tower", "warn", "homelab stop 2026-demo")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dmesg-xid-79.txt", [(79, "0000:01:00", 1, 13987.4, None)]),
        ("dmesg-450-xid.txt", [(32, "0000:01:00", 2, 98600.9, None)]),
        ("journal-xid-remap.txt", [(63, "0000:41:00", 1, 99946.8, None), (94, "0000:41:00", 2, 90940.0, "pt_main_thread")]),
        (
            "dmesg-xid-programs.txt",
            [
                (31, "0000:01:00", 1, 98600.9, "python3"),
                (13, "0000:01:00", 2, 97998.3, "python3"),
                (43, "0000:01:00", 1, 97998.3, "python3"),
                (45, "0000:01:00", 1, 97997.9, "python3"),
            ],
        ),
    ],
)
def test_xid_lines(name: str, expected: list[tuple[Any, ...]]) -> None:
    found = xid.parse(reply(name), uptime_s=100_000.0)
    assert [tuple(entry[key] for key in ("code", "bus_id", "count", "last_s_ago", "program")) for entry in found] == expected


def test_the_journal_is_read_where_dmesg_is_forbidden(bin_folder: Path) -> None:
    fake_gpu.nvidia_smi(bin_folder, reply("nvidia-smi-575-rtx5070ti.xml"))
    refused = "dmesg: read kernel buffer failed: Operation not permitted\n"
    fake_gpu.program(bin_folder, "dmesg", {"": refused}, code=1)
    words = "-k -b -o short-monotonic --no-pager -q -g NVRM: Xid"
    fake_gpu.program(bin_folder, "journalctl", {words: reply("journal-xid-remap.txt")})
    assert [entry["code"] for entry in xid.read({}) or ()] == [63, 94]
    fake_gpu.program(bin_folder, "journalctl", {words: ""}, code=1)
    assert xid.read({}) is None
    fake_gpu.program(bin_folder, "dmesg", {"": "[    0.000000] Linux version 6.8\n"})
    assert xid.read({}) == []


def test_amd_cards_of_rocm_programs() -> None:
    assert amd.parse_rocm_smi(reply("rocm-smi-5.7.json")) == [
        {"name": "Radeon RX 7900 XTX", "memory_total_bytes": 25753026560},
        {"name": "Raphael", "memory_total_bytes": 536870912},
    ]
    assert amd.parse_rocm_smi(reply("rocm-smi-6.2.json"))[0]["name"] == "AMD Radeon RX 6800 XT"
    assert amd.parse_amd_smi(reply("amd-smi-6.4.json")) == [{"name": "AMD Radeon RX 7900 XTX", "memory_total_bytes": 24560 * MIB}]


def device(folder: Path, **files: str) -> None:
    """A folder of the kernel for one device."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_amd_cards_of_the_kernel_without_the_unit_of_a_processor(tmp_path: Path) -> None:
    device(tmp_path / "card0" / "device", vendor="0x1002", mem_info_vram_total=str(512 * MIB))
    device(tmp_path / "card1" / "device", vendor="0x1002", mem_info_vram_total=str(16 << 30), product_name="Radeon PRO W6800")
    device(tmp_path / "card2" / "device", vendor="0x10de")
    (tmp_path / "card1-DP-1").mkdir()
    assert amd._of_kernel(str(tmp_path)) == [{"name": "Radeon PRO W6800", "memory_total_bytes": 16 << 30}]
    assert amd._of_kernel(str(tmp_path / "none")) == []


def test_nvidia_cards_on_the_bus_and_who_has_them(tmp_path: Path) -> None:
    assert gpu.on_bus(str(tmp_path)) is None and gpu.on_bus(str(tmp_path / "none")) is None
    device(tmp_path / "0000:00:1f.3", vendor="0x8086", **{"class": "0x040300"})
    assert gpu.on_bus(str(tmp_path)) == {"cards": 0, "driver": None}
    device(tmp_path / "0000:01:00.0", vendor="0x10de", **{"class": "0x030000"})
    device(tmp_path / "0000:01:00.1", vendor="0x10de", **{"class": "0x040300"})  # the card's sound
    (tmp_path / "0000:01:00.0" / "driver").symlink_to("/sys/bus/pci/drivers/nouveau")
    assert gpu.on_bus(str(tmp_path)) == {"cards": 1, "driver": "nouveau"}


def test_torch_and_nvidia_smi_may_count_cards_in_another_order(tmp_path: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own order is fastest first: cards are paired by uuid, and torch is asked for them in nvidia-smi's order whatever a login says."""
    first, second = "GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa", "GPU-bbbbbbbb-bbbb-bbbb-bbbb-bbbbbbbbbbbb"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    fake_gpu.nvidia_smi(bin_folder, reply("nvidia-smi-550-two-rtx4090.xml"))
    fake_gpu.torch(tmp_path / "site", [("RTX 4090", (8, 9)), ("GT 1030", (6, 1))], uuids=[second[4:], first[4:]])
    answer = gpu.read({})
    assert [entry["compute_capability"] for entry in answer["cards"]] == ["6.1", "8.9"]
    assert [device["uuid"] for device in answer["torch"]["devices"]] == [second, first]
    told = (tmp_path / "site" / "told").read_text().split()
    assert told == ["PCI_BUS_ID", f"{first},{second}"]


def test_bridges_between_cards(bin_folder: Path) -> None:
    said = (
        "GPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-0a)\n\t Link 0: 14.062 GB/s\n\t Link 1: <inactive>\n"
        "GPU 1: NVIDIA GeForce RTX 3090 (UUID: GPU-0b)\n\t Link 0: 14.062 GB/s\n"
        "GPU 2: NVIDIA GeForce GT 1030 (UUID: GPU-0c)\nGPU 3: NVIDIA GeForce RTX 3090 (UUID: GPU-0d)\n\t Link 0: <inactive>\n"
    )
    cards: list[dict[str, Any]] = [{"uuid": f"GPU-0{letter}"} for letter in "abcd"]
    fake_gpu.program(bin_folder, "nvidia-smi", {"nvlink --status": said})
    nvlink.add(cards)
    assert [entry["nvlink"] for entry in cards] == [True, True, False, False]
    fake_gpu.program(bin_folder, "nvidia-smi", {})
    nvlink.add(cards)
    assert [entry["nvlink"] for entry in cards] == [None] * 4
    (bin_folder / "nvidia-smi").unlink()
    nvlink.add(cards)
    one: list[dict[str, Any]] = [{"uuid": "GPU-0a"}]
    nvlink.add(one)
    assert cards[0]["nvlink"] is None and "nvlink" not in one[0], "a card alone is not asked for"


def test_the_path_of_nvidia_smi_is_said_where_a_login_does_not_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(programs, "_ELSEWHERE", [str(tmp_path)])
    monkeypatch.setattr(gpu, "_gpu_probe", lambda cards, layer: None)
    assert "program" not in gpu.read({})
    fake_gpu.nvidia_smi(tmp_path, reply("nvidia-smi-575-rtx5070ti.xml"))
    assert gpu.read({})["program"] == str(tmp_path / "nvidia-smi")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "program" not in gpu.read({})
