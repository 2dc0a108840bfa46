"""What nvidia-smi says beside its answer, or in place of one: it is kept, and what it means is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.config.cluster import Gpu, Node
from homelab.controller.facts import nvidia_answer
from homelab.controller.facts.node import Facts
from homelab.controller.facts.reading import read
from homelab.controller.planning.machines import cards
from homelab.node.probes import gpu, nvidia
from homelab.shared.protocol.card_messages import GpuFacts
from tests.controller.checks import fake_gpu, healthy
from tests.controller.checks.fake_gpu import reply

TWO = "nvidia-smi-550-two-rtx4090.xml"


def facts_of(text: str, **more: object) -> Facts:
    return Facts.model_validate({"node": "tower", "gpu": nvidia.parse(text), **more})


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize("said", ["Not Found", "N/A", "[N/A]", "ERR!", "", "Unknown Error", "13.0 or so"])
def test_words_are_no_version(said: str) -> None:
    text = reply("nvidia-smi-580-gb10.xml").replace("<cuda_version>13.0<", f"<cuda_version>{said}<")
    assert nvidia.parse(text)["driver_cuda"] is None and nvidia.parse(text)["driver_version"] == "580.95.05"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("Unable to determine the device handle for GPU1: 0000:41:00.0: Unknown Error", "lost"),
        ("Unable to determine the device handle for GPU 0000:41:00.0: GPU is lost.  Reboot the system to recover this GPU", "lost"),
        ("WARNING: infoROM is corrupted at gpu 0000:41:00.0", "inforom"),
        ("Failed to initialize NVML: Driver/library version mismatch", "mismatch"),
        ("Failed to initialize NVML: Insufficient Permissions", "permissions"),
        ("Failed to initialize NVML: Unknown Error", "unheard"),
        ("Failed to initialize NVML: GPU access blocked by the operating system", "blocked"),
        ("No devices were found", "no-devices"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "no-driver"),
        ("welcome to this machine", ""),
    ],
)
@pytest.mark.parametrize("place", ["before", "behind", "errors"])
def test_a_line_beside_the_xml_is_kept_and_understood(line: str, kind: str, place: str, bin_folder: Path) -> None:
    text = {"before": f"{line}\n{reply(TWO)}", "behind": f"{reply(TWO)}\n{line}\n", "errors": reply(TWO)}[place]
    program = fake_gpu.nvidia_smi(bin_folder, text)
    if place == "errors":
        program.write_text(program.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\necho '{line.replace(chr(39), '')}' >&2\n", 1))
        line = line.replace("'", "")
        kind = "" if kind == "no-driver" else kind  # the apostrophe is gone
    answer = nvidia.ask()
    assert answer["nvidia_smi"] == "ok" and len(answer["cards"]) == 2 and answer["said"] == [line]
    found = nvidia_answer.complaints(Facts.model_validate({"node": "tower", "gpu": answer}))
    assert found == (((kind, line),) if kind else ())


def test_an_answer_with_a_status_of_its_own_is_an_answer(bin_folder: Path) -> None:
    """nvidia-smi ends with 14 where an infoROM is corrupted."""
    program = fake_gpu.nvidia_smi(bin_folder, reply("nvidia-smi-575-inforom.xml"))
    program.write_text(program.read_text().replace("#!/bin/sh\n", "#!/bin/sh\ntrap 'exit 14' EXIT\n", 1))
    answer = nvidia.ask()
    assert answer["nvidia_smi"] == "ok" and len(answer["cards"]) == 1 and "infoROM" in answer["said"][0]


@pytest.mark.parametrize("part", [0.3, 0.6, 0.95])
def test_an_xml_that_is_cut_off_still_says_versions_and_cards(part: float, bin_folder: Path) -> None:
    text = reply(TWO)
    fake_gpu.nvidia_smi(bin_folder, text)
    program = bin_folder / "nvidia-smi"
    program.write_text(program.read_text().replace(text, text[: int(len(text) * part)]))
    answer = nvidia.ask()
    assert (answer["driver_version"], len(answer["cards"])) == ("550.163.01", 2)
    assert [kind for kind, _ in nvidia_answer.complaints(Facts.model_validate({"node": "tower", "gpu": answer}))] == ["cut-off"]


def test_what_it_says_is_bounded() -> None:
    said = nvidia.parse("x" * 10_000 + "\n" + "noise\n" * 10_000 + reply(TWO))["said"]
    assert len(said) == 16 and max(map(len, said)) == 200


def test_nobody_is_told_to_forget_a_card_that_fell_off_the_bus() -> None:
    beliefs = (Gpu(model="RTX 4090", vram_gb=24), Gpu(model="RTX 4090", vram_gb=24, uuid="GPU-bbbb"))
    node, lost = Node(name="tower", host="192.168.1.100", gpus=beliefs), facts_of(reply("nvidia-smi-550-lost-one-of-two.xml"))
    assert cards.missing(node, lost)
    for facts in (
        lost,
        facts_of(reply("nvidia-smi-550-lost-one-of-two.xml").partition("\n")[2], xid=[{"code": 79, "bus_id": "0000:0a:00"}]),
    ):
        assert nvidia_answer.is_a_card_lost(facts)
        assert "reboot" in cards.choose(node, facts) and "cluster.toml" not in cards.choose(node, facts)
        in_wsl = facts.model_copy(update={"network": facts.network.model_copy(update={"wsl": "nat"})})
        assert "reboot" not in cards.choose(node, in_wsl) and "wsl --shutdown" in cards.choose(node, in_wsl)
    reset_since = facts_of(reply(TWO), xid=[{"code": 79, "bus_id": "0000:01:00"}])
    assert not nvidia_answer.is_a_card_lost(reset_since), "the card is back"


@pytest.mark.parametrize(
    ("card", "shares"),
    [
        ({"name": "NVIDIA GB10", "shares_memory": True}, True),
        ({"name": "a name of tomorrow", "shares_memory": True}, True),
        ({"name": "NVIDIA Thor", "compute_capability": "11.0"}, True),
        ({"name": "Orin (nvgpu)", "compute_capability": "8.7"}, True),
        ({"name": "NVIDIA GB10"}, True),
        ({"name": "NVIDIA GeForce RTX 3070"}, False),
        ({"name": "NVIDIA GH200 480GB", "memory_total_bytes": 96 << 30}, False),
        ({"name": "NVIDIA GeForce RTX 5090", "compute_capability": "12.0"}, False),
    ],
)
def test_whether_a_card_has_memory_of_its_own(card: dict[str, object], shares: bool) -> None:
    assert nvidia_answer.shares_memory(read(GpuFacts, {"index": 0, **card}), Facts(node="tower")) is shares


def test_the_answer_itself_tells_it() -> None:
    one_space = reply("nvidia-smi-580-gb10.xml").replace("NVIDIA GB10", "a name of tomorrow")
    assert nvidia.parse(one_space)["cards"][0]["shares_memory"] is True
    jetson = one_space.replace(">ATS<", ">N/A<").replace("a name of tomorrow", "Orin (nvgpu)")
    assert nvidia.parse(jetson)["cards"][0]["shares_memory"] is True
    unknown = one_space.replace(">ATS<", ">N/A<")
    assert "shares_memory" not in nvidia.parse(unknown)["cards"][0]
    gpu._add_capability(
        answer := {"cards": nvidia.parse(unknown)["cards"], "torch": {"devices": [{"capability": [12, 1], "integrated": True}]}}
    )
    assert answer["cards"][0]["shares_memory"] is True, "torch knows an integrated card"
    with_memory = reply(TWO).replace("<addressing_mode>None<", "<addressing_mode>ATS<")
    assert all("shares_memory" not in card for card in nvidia.parse(with_memory)["cards"]), (
        "GH200 has memory of its own beside one address space"
    )


def test_the_plan_counts_the_machine_s_memory_for_such_a_card() -> None:
    from homelab.controller.planning.machines.machines import RankSlot

    facts = facts_of(reply("nvidia-smi-580-gb10.xml"), system={"memory_total_bytes": 128 << 30, "memory_available_bytes": 100 << 30})
    slot = RankSlot(0, healthy.gpu(names=("tower",)).cluster.nodes[0], 0, "cuda", facts)
    assert slot.memory() == (128 << 30, 28 << 30)
