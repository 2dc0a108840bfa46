"""Each judge: what it finds, on which node, how bad it is, and which command mends it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest

from homelab.checks import registry
from homelab.checks.evidence import Evidence, Finding, Link
from homelab.errors import UnreachableError
from homelab.facts import Facts
from tests.checks import healthy
from tests.checks.healthy import (
    GIB,
    NAMES,
    bad,
    cpu,
    cut,
    gpu,
    packages,
    probe,
    recipe,
    script,
    unreachable,
    with_facts,
    with_node,
)

pytestmark = pytest.mark.timeout(20)

SUBJECTS = {subject.id for subject in registry.SUBJECTS}


def wires(slow: dict[tuple[str, str], float]) -> Evidence:
    """Nodes without GPUs, where these pairs have so many bytes per second and all others 1 Gbit/s."""
    links = tuple(replace(link, throughput_bytes_per_s=slow.get((link.source, link.target), 117e6)) for link in cpu().links)
    return replace(cpu(), links=links)


def judged(evidence: Evidence, check: str) -> list[Finding]:
    """The findings of one check, which must not break."""
    found = [
        finding for finding in registry.judge_all(evidence, skip=SUBJECTS - {check}) if finding.subject == check
    ]
    assert not any("broke" in finding.message for finding in found), found
    return found


def one(evidence: Evidence, check: str) -> Finding:
    """The only finding of this check that is not ok. All other nodes are still well."""
    findings = judged(evidence, check)
    (found,) = bad(findings)
    assert found.hint
    well = {finding.node for finding in findings if finding.level == "ok"}
    assert well - {""} == set(evidence.facts) - {found.node}
    return found


@pytest.mark.parametrize("build", [cpu, gpu])
@pytest.mark.parametrize("of", [None, recipe(), recipe(method={"kind": "qlora"}), script()])
def test_a_healthy_cluster_is_ok_once_per_check_and_node(build: Callable[..., Evidence], of: object) -> None:
    findings = registry.judge_all(build(of))
    assert bad(findings) == []
    for check in SUBJECTS:
        nodes = [finding.node for finding in findings if finding.check == check]
        assert nodes in (list(NAMES), [""]), check
    assert all(finding.message for finding in findings)


@pytest.mark.parametrize("build", [cpu, gpu])
def test_a_single_healthy_node_is_ok(build: Callable[..., Evidence]) -> None:
    assert bad(registry.judge_all(build(recipe(), names=("tower",)))) == []


# (what is broken, check, node, level, words of the message, words of the hint)
CASES: dict[str, tuple[Callable[[], Evidence], str, str, str, str, str]] = {
    "unreachable": (
        lambda: unreachable(cpu(), "laptop", UnreachableError("the login was refused", hint="ssh-copy-id me@laptop")),
        "ssh",
        "laptop",
        "fail",
        "the login was refused",
        "ssh-copy-id me@laptop",
    ),
    "clock a little": (
        lambda: replace(cpu(), clock_offsets_s={"tower": 0, "laptop": 2.5, "oldtower": 0}),
        "clock",
        "laptop",
        "warn",
        "2.5 s ahead",
        "set-ntp",
    ),
    "clock far": (
        lambda: replace(cpu(), clock_offsets_s={"tower": 0, "laptop": 0, "oldtower": -60.0}),
        "clock",
        "oldtower",
        "fail",
        "60.0 s behind",
        "ssh -t me@192.168.1.102",
    ),
    "controller's clock": (
        lambda: replace(cpu(), clock_offsets_s=dict.fromkeys(NAMES, 9.0)),
        "clock",
        "",
        "fail",
        "this machine's clock is 9.0 s behind",
        "sudo timedatectl",
    ),
    "clock not compared": (
        lambda: replace(cpu(), clock_offsets_s={"tower": 0, "laptop": 0}),
        "clock",
        "oldtower",
        "warn",
        "could not be compared",
        "timedatectl",
    ),
    "no environment": (
        lambda: with_facts(cpu(), "laptop", python_executable="/usr/bin/python3", packages={}),
        "python",
        "laptop",
        "fail",
        "no Python at ~/.homelab/env/bin/python",
        "python3 -m venv ~/.homelab/env && ~/.homelab/env/bin/pip install torch==2.13.0 transformers==5.23.0",
    ),
    "old python": (
        lambda: with_facts(cpu(), "laptop", python_version="3.10.12"),
        "python",
        "laptop",
        "fail",
        "needs 3.11",
        "python3.11 -m venv",
    ),
    "no peft": (
        lambda: packages(cpu(), "oldtower", peft=None, accelerate=None),
        "python",
        "oldtower",
        "fail",
        "peft and accelerate are not installed",
        "pip install peft==0.19.0 accelerate==1.15.0",
    ),
    "no bitsandbytes for qlora": (
        lambda: packages(cpu(recipe(method={"kind": "qlora"})), "tower", bitsandbytes=None),
        "python",
        "tower",
        "fail",
        "bitsandbytes",
        "pip install bitsandbytes==0.50.2",
    ),
    "no bitsandbytes for 8-bit adam": (
        lambda: packages(
            cpu(recipe(train={**healthy.SECTIONS["train"], "optimizer": "adamw_8bit"})), "tower", bitsandbytes=None
        ),
        "python",
        "tower",
        "fail",
        "bitsandbytes",
        "pip install",
    ),
    "no tensorboard": (
        lambda: packages(cpu(recipe()), "laptop", tensorboard=None),
        "python",
        "laptop",
        "fail",
        "tensorboard",
        "pip install",
    ),
    "no datasets for hub data": (
        lambda: packages(cpu(recipe(data={"train": "hub:org/name"})), "laptop", datasets=None),
        "python",
        "laptop",
        "fail",
        "datasets",
        "pip install",
    ),
    "no torch for a script": (
        lambda: packages(cpu(script()), "laptop", torch=None),
        "python",
        "laptop",
        "fail",
        "torch",
        "pip install torch",
    ),
    "another version": (
        lambda: packages(cpu(), "tower", transformers="5.20.1"),
        "python",
        "tower",
        "fail",
        "transformers is 5.20.1 here, 5.23.0 on laptop and oldtower",
        "pip install transformers==5.23.0",
    ),
    "another build": (
        lambda: packages(gpu(), "laptop", torch="2.13.0+cu126"),
        "python",
        "laptop",
        "warn",
        "torch is 2.13.0+cu126 here, 2.13.0+cu130 on",
        "--index-url https://download.pytorch.org/whl/cu130 torch==2.13.0+cu130",
    ),
    "no driver": (
        lambda: with_facts(gpu(), "tower", nvidia_smi="missing", gpus=[], gpu_probe=None),
        "gpu",
        "tower",
        "fail",
        "nvidia-smi is not there",
        "sudo apt install nvidia-driver",
    ),
    "driver mismatch": (
        lambda: with_facts(
            gpu(),
            "tower",
            nvidia_smi="Failed to initialize NVML: Driver/library version mismatch\nmore",
            gpus=[],
            gpu_probe=None,
        ),
        "gpu",
        "tower",
        "fail",
        "version mismatch",
        "ssh -t me@192.168.1.100 'sudo reboot'",
    ),
    "a card is gone": (
        lambda: with_facts(gpu(), "laptop", gpus=[], gpu_probe=None),
        "gpu",
        "laptop",
        "fail",
        "names 1 GPU, nvidia-smi shows none",
        "lspci",
    ),
    "another card": (
        lambda: with_node(gpu(), "laptop", gpus=({"model": "RTX 4070", "vram_gb": 8},)),
        "gpu",
        "laptop",
        "warn",
        "is a RTX 4070 Laptop",
        'model = "RTX 4070 Laptop"',
    ),
    "less memory than believed": (
        lambda: with_node(gpu(), "laptop", gpus=({"model": "RTX 4070 Laptop", "vram_gb": 12},)),
        "gpu",
        "laptop",
        "fail",
        "8.0 GiB, cluster.toml says 12",
        "vram_gb = 8",
    ),
    "more memory than believed": (
        lambda: with_node(gpu(), "tower", gpus=({"model": "RTX 5070 Ti", "vram_gb": 12},)),
        "gpu",
        "tower",
        "warn",
        "cluster.toml says 12",
        "vram_gb = 16",
    ),
    "held by a desktop": (
        lambda: healthy.card(gpu(), "tower", memory_used_bytes=4 * GIB, holders=({"program": "Xorg"}, {"program": "firefox"})),
        "gpu",
        "tower",
        "warn",
        "in use by Xorg and firefox",
        "nvidia-smi",
    ),
    "held whole": (
        lambda: healthy.card(gpu(), "laptop", memory_used_bytes=int(7.5 * GIB)),
        "gpu",
        "laptop",
        "fail",
        "7.5 GiB of GPU 0's 8.0 GiB",
        "nvidia-smi",
    ),
    "CPU build": (
        lambda: probe(
            with_facts(packages(gpu(), "tower", torch="2.13.0"), "tower", torch_cuda=None),
            "tower",
            cuda_available=False,
            devices=[],
        ),
        "gpu",
        "tower",
        "fail",
        "a build without CUDA",
        "whl/cu130 torch==2.13.0",
    ),
    "no kernels": (
        lambda: probe(
            gpu(),
            "tower",
            torch="2.5.1+cu121",
            arch_list=["sm_80", "sm_86", "sm_90"],
            device={"matmul_ok": False, "error": "no kernel image"},
        ),
        "gpu",
        "tower",
        "fail",
        "torch 2.5.1+cu121 has no kernels for NVIDIA GeForce RTX 5070 Ti (sm_120)",
        "whl/cu130 torch==2.13.0",
    ),
    "old driver": (
        lambda: probe(
            with_facts(gpu(), "oldtower", driver_cuda="11.4", driver_version="470.1"),
            "oldtower",
            cuda_available=False,
            devices=[],
        ),
        "gpu",
        "oldtower",
        "fail",
        "goes up to CUDA 11.4, torch 2.13.0+cu130 wants 13.0",
        "nvidia-driver",
    ),
    "torch sees nothing": (
        lambda: probe(gpu(), "oldtower", cuda_available=False, devices=[]),
        "gpu",
        "oldtower",
        "fail",
        "sees no GPU",
        "nvidia-driver",
    ),
    "matmul fails": (
        lambda: probe(gpu(), "laptop", device={"matmul_ok": False, "error": "CUDA error: an illegal memory access"}),
        "gpu",
        "laptop",
        "fail",
        "illegal memory access",
        "nvidia-smi",
    ),
    "torch silent": (
        lambda: with_facts(gpu(), "laptop", gpu_probe=None),
        "gpu",
        "laptop",
        "fail",
        "did not answer",
        "import torch",
    ),
    "no bf16": (
        lambda: probe(
            gpu(recipe(train={**healthy.SECTIONS["train"], "precision": "bf16"})), "oldtower", device={"bf16": False}
        ),
        "gpu",
        "oldtower",
        "fail",
        "has no bf16",
        "[train] precision",
    ),
    "a GPU nobody named": (
        lambda: with_facts(cpu(), "tower", nvidia_smi="ok", gpus=gpu().facts["tower"].model_dump()["gpus"]),
        "gpu",
        "tower",
        "warn",
        "names no GPU here",
        "gpus = [{ model",
    ),
    "no LAN": (
        lambda: replace(cpu(), lan={name: place for name, place in cpu().lan.items() if name != "laptop"}),
        "network",
        "laptop",
        "fail",
        "192.168.1.0/24",
        "lan_address",
    ),
    "own name": (
        lambda: with_facts(cpu(), "oldtower", own_name_addresses=["127.0.1.1"]),
        "network",
        "oldtower",
        "warn",
        "127.0.1.1",
        "edit /etc/hosts on oldtower: 192.168.1.102 oldtower",
    ),
    "wifi": (
        lambda: with_facts(
            cpu(),
            "laptop",
            interfaces=[{"name": "eth1", "kind": "wifi", "addresses": ["192.168.1.101/24"], "mtu": 1500}],
        ),
        "network",
        "laptop",
        "warn",
        "Wi-Fi",
        "cable",
    ),
    "100 Mbit": (
        lambda: with_facts(
            cpu(),
            "laptop",
            interfaces=[{"name": "eth1", "addresses": ["192.168.1.101/24"], "mtu": 1500, "speed_mbit": 100}],
        ),
        "network",
        "laptop",
        "warn",
        "100 Mbit/s",
        "cable",
    ),
    "mtu": (
        lambda: with_facts(
            cpu(), "laptop", interfaces=[{"name": "eth1", "addresses": ["192.168.1.101/24"], "mtu": 9000}]
        ),
        "network",
        "laptop",
        "warn",
        "MTU 9000",
        "mtu 1500",
    ),
    "far away": (
        lambda: replace(cpu(), latencies_ms={**cpu().latencies_ms, "tower": 250.0}),
        "network",
        "tower",
        "warn",
        "250 ms from this machine",
        "ping",
    ),
    "firewall": (
        lambda: cut(cpu(), ("tower", "laptop"), ("oldtower", "laptop")),
        "network",
        "laptop",
        "fail",
        "no connection from oldtower and tower on any port tried: no answer",
        "sudo ufw allow from 192.168.1.0/24",
    ),
    "firewall for one": (
        lambda: cut(cpu(), ("tower", "laptop")),
        "network",
        "laptop",
        "fail",
        "no connection from tower",
        "nft insert rule inet filter input ip saddr 192.168.1.0/24 accept",
    ),
    "ephemeral ports only": (
        lambda: cut(cpu(), ("laptop", "tower"), ("oldtower", "tower"), only="ephemeral"),
        "network",
        "tower",
        "fail",
        "ephemeral ports",
        "ufw",
    ),
    "rendezvous port only": (
        lambda: cut(cpu(), ("laptop", "tower"), ("oldtower", "tower"), only="rendezvous"),
        "network",
        "tower",
        "fail",
        "rendezvous port 29500",
        "ufw",
    ),
    "nothing goes out": (
        lambda: cut(cpu(), ("laptop", "tower"), ("laptop", "oldtower")),
        "network",
        "laptop",
        "fail",
        "it cannot open connections to oldtower and tower",
        "ip route get",
    ),
    "cut off": (
        lambda: cut(
            cpu(),
            ("tower", "laptop"),
            ("oldtower", "laptop"),
            ("laptop", "tower"),
            ("laptop", "oldtower"),
            error="No route to host",
        ),
        "network",
        "laptop",
        "fail",
        "in both directions on any port tried: No route to host",
        "ufw",
    ),
    "two nodes, both ways: not the head": (
        lambda: cut(cpu(names=("tower", "laptop")), ("tower", "laptop"), ("laptop", "tower")),
        "network",
        "laptop",
        "fail",
        "no connection from tower in both directions",
        "ufw",
    ),
    "slow link": (
        lambda: replace(
            cpu(),
            links=tuple(
                replace(link, latency_ms=30.0) if "laptop" in (link.source, link.target) else link
                for link in cpu().links
            ),
        ),
        "network",
        "laptop",
        "warn",
        "30 ms to oldtower and tower",
        "ping",
    ),
    "slow wire": (
        lambda: wires({("laptop", "tower"): 11e6, ("tower", "laptop"): 11.2e6, ("oldtower", "laptop"): 10.4e6, ("laptop", "oldtower"): 11e6}),
        "network",
        "laptop",
        "warn",
        "10 MB/s between it and oldtower and tower; the best pair has 117 MB/s",
        "/sys/class/net/eth1/speed",
    ),
    "port held by a run": (
        lambda: with_facts(
            cpu(),
            "tower",
            port={"free": False, "holder": "python -m torch", "holder_pid": 7, "holder_run": "2026-demo"},
        ),
        "network",
        "tower",
        "fail",
        "29500 is held by run 2026-demo",
        "homelab stop 2026-demo",
    ),
    "port held by a stranger": (
        lambda: with_facts(cpu(), "tower", port={"free": False, "holder": "nc -l 29500", "holder_pid": 7}),
        "network",
        "tower",
        "fail",
        "held by nc -l 29500 (pid 7)",
        "kill 7",
    ),
    "port held by somebody": (
        lambda: with_facts(cpu(), "tower", port={"free": False}),
        "network",
        "tower",
        "fail",
        "another user",
        "[parallel] port = 29501",
    ),
    "workdir": (
        lambda: with_facts(cpu(), "laptop", workdir_writable=False),
        "disk",
        "laptop",
        "fail",
        "me cannot write",
        "ls -ld ~/homelab",
    ),
    "disk full": (
        lambda: with_facts(cpu(), "laptop", disk_free_bytes=10**8),
        "disk",
        "laptop",
        "fail",
        "100.0 MB free",
        "df -h ~/homelab",
    ),
    "disk tight": (
        lambda: with_facts(cpu(), "laptop", disk_free_bytes=10**9),
        "disk",
        "laptop",
        "warn",
        "1.0 GB free",
        "workdir =",
    ),
    "disk too small for full training": (
        lambda: with_facts(cpu(recipe(method={"kind": "full"})), "laptop", disk_free_bytes=5 * 10**9),
        "disk",
        "laptop",
        "fail",
        "this recipe needs",
        "df -h",
    ),
    "memory": (
        lambda: with_facts(cpu(recipe()), "laptop", memory_available_bytes=GIB // 2),
        "memory",
        "laptop",
        "fail",
        "0.5 GiB of memory",
        "ps -eo",
    ),
    "memory tight": (
        lambda: with_facts(cpu(), "laptop", memory_available_bytes=750 * 2**20),
        "memory",
        "laptop",
        "warn",
        "0.7 GiB",
        "ps -eo",
    ),
    "model missing": (
        lambda: with_facts(cpu(recipe()), "laptop", model={"found": False, "problem": "there is no such folder"}),
        "model",
        "laptop",
        "fail",
        "there is no such folder",
        "scp -3 -r me@192.168.1.100:models/smol me@192.168.1.101:models/",
    ),
    "hub model not cached": (
        lambda: with_facts(
            cpu(recipe(model={"name": "org/name", "revision": "v1"})),
            "laptop",
            model={"found": False, "problem": "not in the hub cache"},
        ),
        "model",
        "laptop",
        "warn",
        "the first launch downloads it",
        "~/.homelab/env/bin/hf download org/name --revision v1",
    ),
    "another model": (
        lambda: with_facts(
            cpu(recipe()),
            "tower",
            model={"found": True, "config": {**healthy.LLAMA, "hidden_size": 960}, "size_bytes": 270_000_000},
        ),
        "model",
        "tower",
        "fail",
        "hidden_size is 960 here, 576 there",
        "scp -3",
    ),
    "another copy": (
        lambda: with_facts(
            cpu(recipe()), "oldtower", model={"found": True, "config": healthy.LLAMA, "size_bytes": 269_999_999}
        ),
        "model",
        "oldtower",
        "warn",
        "269999999 bytes",
        "scp -3",
    ),
    "data missing": (
        lambda: with_facts(
            cpu(recipe()),
            "laptop",
            data={"train": {"path": "/data/train.jsonl", "found": False, "problem": "No such file or directory"}},
        ),
        "data",
        "laptop",
        "fail",
        "No such file",
        "ssh me@192.168.1.101 'mkdir -p /data' && scp -3 -r me@192.168.1.100:/data/train.jsonl me@192.168.1.101:/data/train.jsonl",
    ),
    "data differs, head too": (
        lambda: with_facts(
            cpu(recipe()),
            "tower",
            data={"train": {"path": "/data/train.jsonl", "found": True, "size_bytes": 1, "sha256": "cd" * 32}},
        ),
        "data",
        "tower",
        "fail",
        "is not the one of laptop and oldtower (sha256 cdcdcdcdcdcd, there abababababab)",
        "scp -3 -r me@192.168.1.101",
    ),
    "battery": (
        lambda: with_facts(cpu(), "laptop", power="battery"),
        "power",
        "laptop",
        "warn",
        "battery",
        "plug it in",
    ),
    "run alive, CPU": (
        lambda: with_facts(cpu(), "laptop", runs_alive=["2026-a"]),
        "runs",
        "laptop",
        "warn",
        "run 2026-a is alive",
        "homelab stop 2026-a",
    ),
    "run alive, GPU": (
        lambda: with_facts(gpu(), "laptop", runs_alive=["a b", "c"]),
        "runs",
        "laptop",
        "fail",
        "runs a b and c are alive",
        "homelab stop 'a b' && homelab stop c",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_broken_thing_is_found_on_its_node_with_the_mending_command(name: str) -> None:
    build, check, node, level, message, hint = CASES[name]
    found = one(build(), check)
    assert (found.node, found.level) == (node, level), found
    assert message in found.message
    assert hint in found.hint


@pytest.mark.parametrize("name", CASES)
def test_a_broken_thing_disturbs_no_other_check(name: str) -> None:
    """Other checks may only speak of the same node (a missing environment has no packages either)."""
    build, _, node, _, _, _ = CASES[name]
    findings = registry.judge_all(build())
    assert {finding.node for finding in bad(findings)} == {node}
    assert not any("broke" in finding.message for finding in findings)


def test_two_failures_at_once_are_blamed_on_two_nodes() -> None:
    four = ("tower", "laptop", "oldtower")
    evidence = cut(
        cpu(names=four), ("tower", "laptop"), ("oldtower", "laptop"), ("laptop", "oldtower"), ("tower", "oldtower")
    )
    assert {finding.node for finding in bad(judged(evidence, "network"))} == {"laptop", "oldtower"}


def test_the_newer_of_two_versions_counts_when_none_has_a_majority() -> None:
    evidence = packages(cpu(names=("tower", "laptop")), "tower", transformers="5.9.0")
    found = one(evidence, "python")
    assert (found.node, found.level) == ("tower", "fail")


def test_a_fallback_interpreter_does_not_vote_on_versions() -> None:
    evidence = cpu()
    for node in ("laptop", "oldtower"):
        evidence = with_facts(
            evidence, node, python_executable="/usr/bin/python3.11", packages={"torch": "1.0", "transformers": "4.0"}
        )
    found = bad(judged(evidence, "python"))
    assert {finding.node for finding in found} == {"laptop", "oldtower"}
    assert all("torch==2.13.0" in finding.hint for finding in found)


@pytest.mark.parametrize(
    ("configured", "answered", "usable"),
    [
        ("~/.homelab/env/bin/python", "/home/me/.homelab/env/bin/python", True),
        ("/opt/env/bin/python", "/opt/env/bin/python", True),
        ("/opt/wrapper", "/opt/env/bin/python", True),
        ("/opt/env/bin/python", "/usr/bin/python3", False),
        ("/usr/bin/python3", "/usr/bin/python3", True),
    ],
)
def test_which_interpreter_counts_as_the_configured_one(configured: str, answered: str, usable: bool) -> None:
    evidence = with_facts(with_node(cpu(), "laptop", python=configured), "laptop", python_executable=answered)
    assert (bad(judged(evidence, "python")) == []) is usable


def test_an_older_driver_of_the_same_major_version_is_fine_when_a_matmul_works() -> None:
    assert bad(judged(with_facts(gpu(), "oldtower", torch_cuda="13.2"), "gpu")) == []


def test_a_card_without_memory_figures_is_judged_by_its_name() -> None:
    """DGX Spark answers [N/A] for memory."""
    evidence = with_node(gpu(), "tower", gpus=({"model": "GB10", "vram_gb": 128},))
    evidence = healthy.card(evidence, "tower", name="NVIDIA GB10", memory_total_bytes=None, memory_used_bytes=None)
    assert bad(judged(evidence, "gpu")) == []


def test_a_hub_model_absent_everywhere_and_data_absent_everywhere_have_hints() -> None:
    evidence = cpu(recipe())
    for node in NAMES:
        evidence = with_facts(evidence, node, model={"found": False, "problem": "no weights"}, data={})
    for check in ("model", "data"):
        found = bad(judged(evidence, check))
        assert [finding.node for finding in found] == list(NAMES)
        assert all("recipe" in finding.hint for finding in found)


def test_practice_nodes_on_loopback_are_not_warned_of_loopback_names() -> None:
    evidence = with_facts(cpu(), "tower", own_name_addresses=["127.0.1.1"])
    evidence = replace(evidence, lan={**evidence.lan, "tower": ("127.0.0.2", "lo")})
    assert not any("its own name" in finding.message for finding in judged(evidence, "network"))


def test_node_names_paths_and_users_are_quoted_in_hints() -> None:
    nasty = "/data/it's $(touch x).jsonl"
    evidence = cpu(recipe(data={"train": nasty}))
    evidence = with_node(evidence, "laptop", user="a.b", port=2222, identity_file="/keys/my key")
    evidence = with_facts(evidence, "laptop", data={"train": {"path": nasty, "found": False}})
    hint = one(evidence, "data").hint
    words = shlex.split(hint)
    assert words[:6] == ["ssh", "-p", "2222", "-i", "/keys/my key", "a.b@192.168.1.101"]
    assert words[6] == "mkdir -p /data"
    assert f"me@192.168.1.100:{nasty}" in words
    assert words[-1].startswith("scp://a.b@192.168.1.101:2222//data/it%27s%20")


def test_a_node_that_is_the_controller_itself_needs_no_ssh() -> None:
    evidence = packages(with_node(cpu(), "tower", host="local"), "tower", peft=None)
    assert one(evidence, "python").hint == "~/.homelab/env/bin/python -m pip install peft==0.19.0"


def test_every_link_error_reaches_a_finding() -> None:
    link = Link("tower", "laptop", "192.168.1.101", 41000, False, error="something else answered on this port")
    evidence = replace(cpu(), links=(*cpu().links, link))
    assert "something else answered" in one(evidence, "network").message


def test_wires_that_are_all_slow_or_only_less_fast_are_no_finding() -> None:
    names = healthy.NAMES
    everywhere = {(a, b): 11e6 for a in names for b in names if a != b}
    assert not healthy.bad(judged(wires(everywhere), "network")), "the others are no better: nothing to mend on one node"
    assert not healthy.bad(judged(wires({("tower", "laptop"): 50e6}), "network"))
    one_way = healthy.bad(judged(wires({("tower", "laptop"): 5e6}), "network"))
    assert [(finding.node, finding.level) for finding in one_way] == [("laptop", "warn")]


def test_facts_that_say_next_to_nothing_break_no_check() -> None:
    empty = Facts(node="laptop", time=0, hostname="", user="", home="", workdir="")
    evidence = gpu(recipe())
    findings = registry.judge_all(replace(evidence, facts={**evidence.facts, "laptop": empty}))
    assert not any("broke" in finding.message for finding in findings)
    assert any(finding.node == "laptop" and finding.level == "fail" for finding in findings)
