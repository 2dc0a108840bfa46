"""The environment of ranks on CUDA: what NCCL and torch are told, and what a person may add to it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.base.secrets import masked
from homelab.controller.config.recipe import Recipe
from homelab.controller.launchers.torchrun_ssh import by_hand
from homelab.controller.planning.render import plan_table
from homelab.shared.protocol.message import as_json
from tests.controller.checks import healthy
from tests.controller.planning.machines.test_cards import RTX, SECOND, two_cards
from tests.controller.planning.test_plan import make, why


def of(seen: Any, node: str = "tower", recipe: Recipe | None = None) -> dict[str, str]:
    return make(seen, recipe).node(node).environment


def test_what_nccl_is_told() -> None:
    made = make(healthy.gpu())
    for node in made.nodes:
        found = node.environment
        assert found["NCCL_SOCKET_IFNAME"] == f"={node.interface}", "a plain name is a prefix"
        assert found["GLOO_SOCKET_IFNAME"] == node.interface, "gloo takes it as it is"
        assert (found["NCCL_SOCKET_FAMILY"], found["NCCL_IB_DISABLE"]) == ("AF_INET", "1")
        assert found["NCCL_DEBUG_FILE"] == f"{node.run_dir}/attempts/1/nodes/{node.name}/nccl-%h-%p.log"
        assert found["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "1000"
        assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert not {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_PROPAGATE_ERROR"} & found.keys()
        assert not [name for name in found if "BUFFER_SIZE" in name or "DUMP_ON_TIMEOUT" in name], (
            "torch's defaults; two names of one thing warn"
        )
        assert "NCCL_P2P_DISABLE" not in found, "one card has nobody to talk to"
    on_cpus = make(healthy.cpu()).nodes[0].environment
    assert not [name for name in on_cpus if "NCCL" in name or "CUDA" in name or "ALLOC" in name]


@pytest.mark.parametrize(
    ("names", "nvlink", "disabled"),
    [
        (("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"), None, True),
        (("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"), False, True),
        (("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"), True, False),
        (("NVIDIA RTX A5000", "NVIDIA RTX A5000"), None, False),
        (("NVIDIA RTX 4000 Ada Generation", "NVIDIA RTX 4000 Ada Generation"), None, True),  # "RTX 40" is what accelerate looks for
        (("NVIDIA GeForce GT 1030", "NVIDIA GeForce RTX 4090"), None, True),  # accelerate counts the card that takes no part
    ],
)
def test_peer_access_between_geforce_cards(names: tuple[str, str], nvlink: bool | None, disabled: bool) -> None:
    seen = two_cards(*names, gpus=(RTX,) if "1030" in names[0] else ())
    seen = healthy.with_facts(seen, "tower", gpu={"cards": [{**as_json(card), "nvlink": nvlink} for card in seen.facts["tower"].gpu.cards]})
    assert ("NCCL_P2P_DISABLE" in of(seen)) is disabled


def test_the_allocator_grows_its_segments_but_not_under_wsl() -> None:
    seen = healthy.gpu()
    assert of(seen)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert not [name for name in of(healthy.with_facts(seen, "tower", network={"wsl": "mirrored"})) if name.endswith("ALLOC_CONF")]
    old = of(healthy.packages(seen, "tower", torch="2.9.1+cu126"))
    assert old["PYTORCH_CUDA_ALLOC_CONF"] and "PYTORCH_ALLOC_CONF" not in old
    theirs = healthy.with_node(seen, "tower", environment={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert "PYTORCH_ALLOC_CONF" not in of(theirs) and of(theirs)["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"


def test_torch_needs_no_compiler_on_a_node() -> None:
    """torch 2.13 multiplies some shapes with Triton, which compiles first; the variable that forbids it is the one that this torch reads."""
    assert all(node.environment["TORCH_DISABLE_NATIVE_JIT"] == "1" for node in make(healthy.gpu()).nodes)
    assert of(healthy.gpu(), recipe=healthy.script(environment={"TORCH_DISABLE_NATIVE_JIT": "0"}))["TORCH_DISABLE_NATIVE_JIT"] == "0", (
        "a script may"
    )
    (folder,) = importlib.util.find_spec("torch").submodule_search_locations  # type: ignore[union-attr]
    assert 'os.getenv("TORCH_DISABLE_NATIVE_JIT", 0)' in Path(folder, "_native", "common_utils.py").read_text()


def test_offline_cards_are_named_only_where_cluster_toml_does() -> None:
    seen = healthy.gpu()
    assert "CUDA_VISIBLE_DEVICES" not in make(seen, offline=True).nodes[0].environment
    named = healthy.with_node(seen, "tower", gpus=({**RTX, "uuid": SECOND},))
    assert make(named, offline=True).nodes[0].environment["CUDA_VISIBLE_DEVICES"] == SECOND


def test_a_person_s_variables_reach_the_ranks_as_they_are() -> None:
    odd = 'it\'s $(touch pwned) `x` \\ "y" ; ä'
    recipe = healthy.recipe(environment={"NCCL_DEBUG": "INFO", "ODD": "of the recipe", "NCCL_IB_DISABLE": "0"})
    seen = healthy.with_node(healthy.gpu(), "tower", environment={"ODD": odd, "OMP_NUM_THREADS": "2"})
    made = make(seen, recipe)
    tower, laptop = made.node("tower"), made.node("laptop")
    assert (tower.environment["ODD"], laptop.environment["ODD"]) == (odd, "of the recipe"), "the node goes before the recipe"
    assert (tower.environment["NCCL_DEBUG"], tower.environment["NCCL_IB_DISABLE"]) == ("INFO", "0"), "a person goes before us"
    assert (tower.environment["OMP_NUM_THREADS"], laptop.environment["OMP_NUM_THREADS"]) == ("2", "4")
    assert why(made, "environment of tower") == ("ODD, OMP_NUM_THREADS", "`environment` of tower in cluster.toml")
    assert "ODD=of the recipe" in plan_table.text(made) and "the recipe sets them for" in plan_table.text(made)
    line = by_hand(tower, "me@tower").splitlines()[1].partition(" && ")[2].removesuffix("\\")
    question = f"{line} python3 -c 'import json, os; print(json.dumps(os.environ[\"ODD\"]))'"
    done = subprocess.run(["/bin/sh", "-c", question], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]})
    assert json.loads(done.stdout) == odd
    on_cpus = make(healthy.with_node(healthy.cpu(), "tower", environment={"ODD": odd}), healthy.recipe(environment={"MORE": "1"}))
    assert (on_cpus.node("tower").environment["ODD"], on_cpus.node("laptop").environment["MORE"]) == (odd, "1")


def test_what_all_ranks_of_nccl_must_have_alike() -> None:
    seen = healthy.with_node(healthy.gpu(), "laptop", environment={"NCCL_BUFFSIZE": "2097152"})
    with pytest.raises(InputError, match="NCCL_BUFFSIZE differs between tower and laptop") as caught:
        make(seen)
    assert "laptop" in caught.value.where and "[defaults.environment]" in caught.value.hint
    assert make(seen, healthy.recipe(environment={"NCCL_BUFFSIZE": "2097152"})), "the recipe says it to the others"
    assert make(healthy.with_node(healthy.gpu(), "laptop", environment={"NCCL_P2P_DISABLE": "1"})), "that concerns its own box"
    assert make(healthy.with_node(healthy.gpu(), "laptop", environment={"NCCL_IB_DISABLE": "1"})), "all have that value from us"


def test_secrets_and_logins_are_masked_and_nothing_else() -> None:
    given = {
        "HF_TOKEN": "hf_x",
        "TOKENIZERS_PARALLELISM": "false",
        "HTTPS_PROXY": "http://me:pass@proxy:3128",
        "HF_TOKEN_PATH": "/keys/hf",
        "A": "me@tower",
    }
    assert masked(given) == {**given, "HF_TOKEN": "***", "HTTPS_PROXY": "http://***@proxy:3128"}
    hard = {
        "PGPASSWORD": "x",
        "MYTOKEN": "x",
        "MYSQL_PWD": "x",
        "B": "http://me:pa@ss@proxy",
        "C": "http://me:pa/ss@proxy",
        "D": "http://proxy:80/a@b",
        "PWD": "/home",
    }
    assert masked(hard) == {
        **dict.fromkeys(("PGPASSWORD", "MYTOKEN", "MYSQL_PWD"), "***"), "B": "http://***@proxy", "C": "http://***@proxy", "D": hard["D"], "PWD": "/home",
    }  # fmt: skip
