"""The environment variables of ranks on CUDA, each with its reason. Pure.

Sources: NCCL's guide (environment variables) and source (src/misc/socket.cc, src/debug.cc); torch 2.13, ProcessGroupNCCL.hpp and .cpp,
c10/cuda/CUDAAllocatorConfig.h. Left at torch's defaults on purpose: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480: with less its monitor
aborts a rank that correctly waits for slow peers) and TORCH_NCCL_PROPAGATE_ERROR (it ends no rank, and makes the watchdog ask the store
while it holds a lock).
"""

from __future__ import annotations

import re

from homelab.controller.config.cluster import Node
from homelab.controller.facts.node import Facts
from homelab.controller.planning.machines import cards

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the name before torch 2.10
# As accelerate has it (utils/environment.py, check_cuda_p2p_ib_support: "RTX 40" takes the RTX 4000 Ada, too), and every other GeForce.
_GEFORCE = re.compile(r"GeForce|RTX ?40|\b[GR]TX ?\d?\d[5-9]0\b", re.IGNORECASE)


def environment(node: Node, facts: Facts | None, *, address: str, interface: str, node_dir: str) -> dict[str, str]:
    """The variables of every rank of one node. `address` is its own on the LAN, `node_dir` the attempt's folder there."""
    variables = {
        # nvidia-smi's order, also for what numbers cards by itself (CUDA's own is fastest first).
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # "=": exactly this one. Without it the name is a prefix, and eno1 takes eno10 too, eth0 also eth0.20.
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "NCCL_SOCKET_FAMILY": "AF_INET6" if ":" in address else "AF_INET",
        # A second-hand InfiniBand or RoCE card in one node: NCCL would take it there, and sockets on the others.
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "WARN",
        # A file of its own: to standard error it would begin the rank's log anew (it opens the file for writing).
        "NCCL_DEBUG_FILE": f"{node_dir}/nccl-%h-%p.log",
        # What a rank sleeps, four times, between seeing that a peer is gone and ending: 60 s by default, 4 s so.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
        # From 2.13 on torch multiplies (b, m, 1) by (b, 1, n) with Triton (torch/_native/ops/bmm_outer_product), as rotary embeddings do. Triton
        # compiles its launcher first, and without gcc or Python.h that is the end of the run (pytorch issue 196977). The kernel of before is as exact.
        "TORCH_DISABLE_NATIVE_JIT": "1",
    }
    visible = _visible(node, facts)
    if visible:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    if _shares_a_box_with_geforce(node, facts):
        variables["NCCL_P2P_DISABLE"] = "1"
    if facts is None or facts.network.wsl is None:  # under WSL2 it ends the process at the first allocation
        variables[ALLOCATOR[_is_before_210(facts)]] = "expandable_segments:True"
    return variables


def _visible(node: Node, facts: Facts | None) -> str:
    """The plan's cards in the order of their local ranks: by uuid, else by nvidia-smi's number. Empty where they are not known, and for cards
    that MIG has split, whose parts have names of their own."""
    if facts is None:
        return ",".join(gpu.uuid for gpu in node.gpus if gpu.uuid) if all(gpu.uuid for gpu in node.gpus) else ""
    if any(card.mig for card in facts.gpu.cards) and not facts.gpu.left_out:
        return ""
    uuids = [card.uuid for card in facts.gpu.cards]
    return ",".join(uuid for uuid in uuids if uuid) if all(uuids) else ",".join(str(card.index) for card in facts.gpu.cards)


def _shares_a_box_with_geforce(node: Node, facts: Facts | None) -> bool:
    """Whether cards without a way to each other stand in one machine: peer access that the driver reports may hang there. Cards that
    take no part count, because accelerate counts them (state.py refuses several cards with an RTX 40 and a driver before 550.40.07)."""
    if facts is None:
        return len(node.gpus) > 1 and any(_GEFORCE.search(gpu.model) for gpu in node.gpus)
    all_cards = cards.everything(facts)
    has_bridge = any(card.nvlink for card in facts.gpu.cards)
    return len(all_cards) > 1 and not has_bridge and any(_GEFORCE.search(card.name) for card in all_cards)


def _is_before_210(facts: Facts | None) -> bool:
    version = re.match(r"(\d+)\.(\d+)", (facts.python.packages.get("torch") if facts else None) or "")
    return version is not None and (int(version[1]), int(version[2])) < (2, 10)
