"""plan.make: who takes part, with which backend, environment and command, and the reason of each choice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.base.shell import in_sh, quote_path, quote_torchrun, quote_words
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import Recipe, parse_recipe
from homelab.controller.launchers import torchrun_ssh
from homelab.controller.planning.memory_estimate import DryRun, MemoryEstimate, MemoryItem
from homelab.controller.planning.render import plan_table
from homelab.controller.planning.types import Plan
from tests import builders
from tests.controller.checks import healthy

NAMES = healthy.NAMES


def make(seen: Evidence, recipe: Recipe | None = None, *, offline: bool = False, cluster: Cluster | None = None, **more: Any) -> Plan:
    return builders.make_plan(cluster or seen.cluster, recipe or healthy.recipe(), {} if offline else seen.facts, **more)


def why(made: Plan, subject: str) -> tuple[str, str]:
    found = [choice for choice in made.choices if choice.subject == subject]
    assert len(found) == 1, (subject, made.choices)
    return found[0].value, found[0].because


def with_shares(**shares: int) -> Recipe:
    return healthy.recipe(parallel={"shares": shares})


def test_a_cluster_of_cpus() -> None:
    made = make(healthy.cpu())
    assert (made.device, made.backend, made.precision, made.strategy, made.world_size) == ("cpu", "gloo", "fp32", "ddp", 3)
    assert [rank.node for rank in made.ranks] == list(NAMES) and [rank.rank for rank in made.ranks] == [0, 1, 2]
    assert sum(rank.share for rank in made.ranks) == 12 and all(1 <= rank.micro_batch <= rank.share for rank in made.ranks)
    assert made.head == NAMES[0] and made.master_address == made.nodes[0].lan_address and made.left_out == ()
    assert why(made, "device") == ("cpu", "no node has a CUDA card")
    assert why(made, "head")[0] == NAMES[0]
    assert why(made, "backend")[1].startswith("no CUDA cards")
    for number, node in enumerate(made.nodes):
        assert node.node_rank == number and node.rank_count == 1
        assert why(made, f"LAN address of {node.name}")[0] == f"{node.lan_address} on {node.interface}"


@pytest.mark.parametrize("offline", [False, True])
def test_a_cluster_of_gpus_with_and_without_asking(offline: bool) -> None:
    made = make(healthy.gpu(), offline=offline)
    assert (made.device, made.backend, made.precision, made.world_size) == ("cuda", "nccl", "bf16", 3)
    assert sum(rank.share for rank in made.ranks) == 12
    names = [rank.device_name for rank in made.ranks]
    assert "5070" in names[0] and "4070" in names[1]
    assert made.ranks[0].share > made.ranks[2].share, "the faster card computes more"
    assert why(made, "precision") == ("bf16", "every card has bf16")


def test_nodes_without_a_card_are_left_out_among_gpus() -> None:
    gpu, cpu = healthy.gpu(), healthy.cpu()
    mixed = gpu.cluster.model_copy(update={"nodes": (gpu.cluster.nodes[0], gpu.cluster.nodes[1], cpu.cluster.nodes[2])})
    facts = {**gpu.facts, NAMES[2]: cpu.facts[NAMES[2]]}
    made = builders.make_plan(mixed, healthy.recipe(), facts)
    assert made.left_out == (NAMES[2],) and made.world_size == 2 and made.device == "cuda"
    assert why(made, f"node {NAMES[2]}") == ("left out", f"{NAMES[2]} has no CUDA card, and CPU ranks would slow every step")
    assert why(made, "device") == ("cuda", "2 of 3 nodes have CUDA cards")
    # Its samples in the recipe's table are taken over by the others: the law holds.
    shares = with_shares(**{NAMES[0]: 6, NAMES[1]: 3, NAMES[2]: 3})
    made = builders.make_plan(mixed, shares, facts)
    assert [rank.share for rank in made.ranks] == [8, 4] and NAMES[2] in why(made, "shares")[1]


def test_a_share_of_zero_leaves_a_node_out() -> None:
    made = make(healthy.cpu(), with_shares(**{NAMES[0]: 0, NAMES[1]: 8, NAMES[2]: 4}))
    assert made.left_out == (NAMES[0],) and made.head == NAMES[1] and made.world_size == 2
    assert [(rank.node, rank.share) for rank in made.ranks] == [(NAMES[1], 8), (NAMES[2], 4)]
    assert why(made, f"node {NAMES[0]}") == ("left out", f"the share of {NAMES[0]} in the recipe is 0")
    assert all("--nnodes=2" in node.command and f"--master-addr={made.nodes[0].lan_address}" in node.command for node in made.nodes)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({NAMES[0]: 12}, "no share is given for"),
        ({NAMES[0]: 4, NAMES[1]: 4, NAMES[2]: 5}, "sum to 13"),
        ({NAMES[0]: 6, NAMES[1]: 6, NAMES[2]: 0, "towr": 0}, 'no node is named "towr". Did you mean "tower"?'),
        ({NAMES[0]: 4, NAMES[1]: 4, "towr": 4}, 'no node is named "towr"'),
    ],
)
def test_shares_that_cannot_be(shares: dict[str, int], words: str) -> None:
    with pytest.raises(InputError) as caught:
        make(healthy.cpu(), with_shares(**shares))
    assert words in caught.value.message and "shares" in caught.value.where and caught.value.hint


def test_shares_that_give_the_nodes_at_hand_nothing() -> None:
    seen = healthy.cpu()
    with pytest.raises(InputError, match=f"gives no samples to {NAMES[2]}"):
        make(seen, with_shares(**{NAMES[0]: 12, NAMES[1]: 0, NAMES[2]: 0}), cluster=seen.cluster.only((NAMES[2],)))


def test_more_ranks_than_samples_and_fewer_nodes_than_wanted() -> None:
    small = healthy.recipe(train={"global_batch": 2, "steps": 1, "learning_rate": 1e-3})
    with pytest.raises(InputError, match="2 samples cannot feed 3 ranks"):
        make(healthy.cpu(), small)
    with pytest.raises(InputError, match="3 nodes are left, the recipe needs at least 4") as caught:
        make(healthy.cpu(), healthy.recipe(recovery={"min_nodes": 4}))
    assert "min_nodes" in caught.value.where


def test_a_node_whose_address_is_not_clear() -> None:
    seen = healthy.cpu()
    seen = healthy.with_facts(seen, NAMES[1], network={"interfaces": [], "routes": {}})
    cluster = seen.cluster.model_copy(
        update={
            "nodes": tuple(
                node.model_copy(update={"lan_address": None, "interface": None, "host": "some-name"}) for node in seen.cluster.nodes
            )
        }
    )
    with pytest.raises(InputError, match=f"which address of {NAMES[1]} is on the LAN is not clear") as caught:
        make(seen, cluster=cluster)
    assert "lan_address" in caught.value.hint
    alone = make(seen, cluster=cluster.only((NAMES[1],)))
    assert alone.master_address == "127.0.0.1", "a single node needs no LAN"


def test_the_environment_names_the_interface_of_each_node() -> None:
    seen = healthy.gpu()
    made = make(seen)
    for node in made.nodes:
        environment = node.environment
        assert environment["GLOO_SOCKET_IFNAME"] == node.interface and environment["NCCL_SOCKET_IFNAME"] == f"={node.interface}"
        assert environment["PYTHONPATH"] == f"{node.workdir}/code/abc" and environment["HOMELAB_NODE"] == node.name
        assert (environment["HOMELAB_RUN"], environment["HOMELAB_RUN_DIR"], environment["HOMELAB_ATTEMPT"]) == (made.run, node.run_dir, "1")
        assert not any("TOKEN" in key for key in environment)
    assert "NCCL_SOCKET_IFNAME" not in make(healthy.cpu()).nodes[0].environment
    assert made.nodes[0].environment["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in make(seen, healthy.recipe(model={"name": "org/name"})).nodes[0].environment


def test_a_script_is_started_with_its_own_words() -> None:
    made = make(healthy.cpu(), parse_recipe({"script": {"path": "train.py", "args": ("--x", "$(touch pwned)")}}))
    assert made.nodes[0].command[-3:] == (f"{made.nodes[0].workdir}/data/def/train.py", "--x", "$(touch pwned)")
    assert [rank.share for rank in made.ranks] == [0, 0, 0]
    assert make(healthy.cpu()).nodes[0].command[-2:] == ("-m", "homelab.worker")


def test_the_recipe_decides_the_training_and_the_cluster_does_not() -> None:
    """The same recipe on one node and on three: nothing but who computes what is different in the plan."""
    seen = healthy.cpu()
    one, three = make(seen, cluster=seen.cluster.only((NAMES[0],))), make(seen)
    assert sum(rank.share for rank in one.ranks) == sum(rank.share for rank in three.ranks) == 12
    assert one.precision == three.precision
    warned = make(seen, healthy.recipe(method={"kind": "lora", "dropout": 0.1})).warnings
    assert any(warning.startswith("law: dropout") for warning in warned) and not any(
        "law" in warning for warning in three.warnings if "precision" not in warning
    )


def test_a_plan_is_the_same_after_a_trip_through_json() -> None:
    made = make(healthy.gpu(), attempt=3, resume_step=40, port=29777)
    assert Plan.model_validate(json.loads(json.dumps(made.model_dump(mode="json")))) == made
    assert (made.attempt, made.resume_step, made.master_port) == (3, 40, 29777)
    assert all("--rdzv-id=2026-01-01-0000-run-3" in node.command and "--master-port=29777" in node.command for node in made.nodes)


def test_the_text_of_a_plan_says_who_what_and_why() -> None:
    made = make(healthy.gpu())
    text = plan_table.text(made)
    for words in (*NAMES, "5070", "nccl", "torch.distributed.run", "because", "every card has bf16", "12"):
        assert words in text
    assert "every card has bf16" not in _printed(made, why=False) and "--why" in _printed(made, why=False)


def _printed(made: Plan, *, why: bool) -> str:
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan_table.table(made, why=why))
    return console.export_text()


ODD = [
    "",
    " ",
    "a b",
    "it's",
    '"',
    "$(touch pwned)",
    "`touch pwned`",
    "a\nb",
    "\\",
    "\\\\n",
    "!",
    "a!b",
    "*",
    "~",
    "~/x",
    "#",
    "ä 中",
    ";&|<>()",
    "-n",
    "%s%b\\0101",
    "\\0101",
]


@pytest.mark.parametrize("shell", ["/bin/sh", "bash", "fish", "tcsh"])
def test_words_go_through_a_shell_as_they_are(shell: str, tmp_path: Path) -> None:
    import shutil

    if shutil.which(shell) is None:
        pytest.skip(f"not installed: {shell}")
    words = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", *ODD]
    text = in_sh(quote_words(words))
    done = subprocess.run([shell, "-c", text], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert json.loads(done.stdout) == ODD
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["~", "~/a b", "~/$(touch pwned)", "/a b/it's", "~x/y", "/~/x"])
def test_only_the_home_of_a_path_is_expanded(path: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"printf %s {quote_path(path)}"],
        capture_output=True,
        text=True,
        env={"HOME": "/home/me too"},
        cwd=tmp_path,
        check=True,
    )
    expected = path.replace("~", "/home/me too", 1) if path == "~" or path.startswith("~/") else path
    assert done.stdout == expected and not list(tmp_path.iterdir())


def test_what_a_person_runs_by_hand_is_what_was_planned(tmp_path: Path) -> None:
    """commands.sh: the environment and the argument list arrive unchanged, secrets masked."""
    made = make(healthy.cpu())
    program = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), {k: os.environ.get(k) for k in ('A', 'HF_TOKEN')}]))"
    node = made.nodes[0].model_copy(update={
        "run_dir": str(tmp_path), "environment": {"A": "it's $(touch pwned)\nx", "HF_TOKEN": "hf_secret"},
        "command": (sys.executable, "-c", program, *ODD),
    })  # fmt: skip
    text = torchrun_ssh.by_hand(node, "me@host")
    assert "hf_secret" not in text and text.startswith("# node ")
    done = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, cwd="/", check=True)
    assert json.loads(done.stdout) == [ODD, str(tmp_path), {"A": "it's $(touch pwned)\nx", "HF_TOKEN": "***"}]
    assert not list(tmp_path.iterdir())


def test_the_command_of_a_plan_without_machines_runs_in_the_home_of_whoever_types_it(tmp_path: Path) -> None:
    """`plan --offline` knows no home: what it prints has `~/` in it, which quotes would make a name of a folder."""
    home = tmp_path / "my home"
    python = home / ".homelab/env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    made = make(healthy.cpu())
    node = made.nodes[0].model_copy(update={
        "run_dir": "~/homelab/runs/a", "environment": {},
        "command": ("~/.homelab/env/bin/python", "-m", "torch.distributed.run", "--log-dir=~/homelab/runs/a b/logs", "--rdzv-conf=timeout=60", "x=~/y", "~user/z"),
    })  # fmt: skip
    (home / "homelab/runs/a").mkdir(parents=True)
    said = ["-m", "torch.distributed.run", f"--log-dir={home}/homelab/runs/a b/logs", "--rdzv-conf=timeout=60", "x=~/y", "~user/z"]
    for text in (torchrun_ssh.by_hand(node, "me@host"), quote_torchrun(node.command)):
        done = subprocess.run(
            ["/bin/sh", "-c", text],
            capture_output=True,
            text=True,
            env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
            cwd=tmp_path,
            check=True,
        )
        assert done.stdout.splitlines() == said


@pytest.mark.parametrize(
    ("needed", "with_dry_run", "words"),
    [
        (0.80, False, "8.0 of 10.0 GB"),
        (0.90, False, "TIGHT"),
        (0.90, True, "9.0 of 10.0 GB"),
        (0.96, True, "TIGHT"),
        (1.01, False, "does NOT fit"),
    ],
)
def test_a_plan_that_barely_fits_says_so(needed: float, with_dry_run: bool, words: str) -> None:
    """An estimate by formulas may be 15 % too low, that of a dry run 5 %."""
    run = DryRun(node="tower", peak_bytes=1, at="mm", analytic_bytes=1, seconds=1.0) if with_dry_run else None
    memory = MemoryEstimate(items=(MemoryItem(name="all", size_bytes=round(needed * 10**10)),), available_bytes=10**10, dry_run=run)
    said = plan_table._fit(memory).plain
    assert words in said and ("TIGHT" in said) is (words == "TIGHT")
