"""What torch makes of the cards: is it a CUDA build, does the driver suit it, has it kernels for them, does a matmul work?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from homelab.checks.commands import on_node, path_word, pip_install
from homelab.config.cluster import Node
from homelab.config.recipe import Recipe
from homelab.facts import Facts

Problem = tuple[str, str]  # message, hint


def problems(recipe: Recipe | None, node: Node, facts: Facts, driver_hint: str) -> Iterator[Problem]:
    """What keeps torch from computing on this node's cards. The first cause only: the others would follow from it."""
    torch = facts.packages.get("torch")
    if not torch:
        return  # the python check says so
    if facts.torch_cuda is None and not re.search(r"\+(cu|rocm)\d", torch) and not _sees_cards(facts):
        yield f"torch {torch} is a build without CUDA", _install_cuda_build(node, facts)
        return
    probe = facts.gpu_probe
    if probe is None:
        question = f"{path_word(node.python)} -c 'import torch; print(torch.randn(2, 2, device=\"cuda\"))'"
        yield "torch did not answer when it was asked for the GPUs", on_node(node, question)
        return
    devices: list[dict[str, Any]] = list(probe.get("devices") or [])
    found = list(_kernels(node, facts, probe, devices))
    failed = [device for device in devices if not device.get("matmul_ok")]
    if not found and (failed or not probe.get("cuda_available")) and driver_is_older(facts):
        found = [
            (
                f"the driver ({facts.driver_version}) goes up to CUDA {facts.driver_cuda}, torch {torch} wants {facts.torch_cuda}",
                driver_hint,
            )
        ]
    if not found and not probe.get("cuda_available"):
        found = [(f"torch {torch} sees no GPU, though nvidia-smi does", driver_hint)]
    if not found and len(devices) < len(facts.gpus):
        message = f"torch sees {len(devices)} of {len(facts.gpus)} GPUs"
        found = [(message, f"look for CUDA_VISIBLE_DEVICES: {on_node(node, 'env | grep CUDA')}")]
    if not found:
        for device in failed:
            why = device.get("error") or "its result was wrong"
            found.append((f"a small matmul failed on {device.get('name')}: {why}", on_node(node, "nvidia-smi")))
    yield from found
    if not found and recipe and recipe.train and recipe.train.precision == "bf16":
        for device in devices:
            if not device.get("bf16"):
                yield f"{device.get('name')} has no bf16", 'edit the recipe: [train] precision = "auto" (or "fp16")'


def _sees_cards(facts: Facts) -> bool:
    return bool(facts.gpu_probe and facts.gpu_probe.get("cuda_available"))


def _kernels(node: Node, facts: Facts, probe: dict[str, Any], devices: list[dict[str, Any]]) -> Iterator[Problem]:
    """Cards for which this build holds no kernels: torch's own architecture list against the cards' capability."""
    architectures = [str(entry) for entry in probe.get("arch_list") or []]
    seen = set()
    for device in devices:
        capability = device.get("capability")
        if not (architectures and isinstance(capability, list | tuple) and len(capability) == 2):
            continue
        major, minor = int(capability[0]), int(capability[1])
        if (major, minor) in seen or has_kernels(architectures, major, minor):
            continue
        seen.add((major, minor))
        version = probe.get("torch") or facts.packages.get("torch")
        message = f"torch {version} has no kernels for {device.get('name')} (sm_{major}{minor})"
        yield message, _install_cuda_build(node, facts)


def has_kernels(architectures: list[str], major: int, minor: int) -> bool:
    """Whether code for these architectures runs on a card of this compute capability.

    Binary code (sm_86) runs on the same major version with the same or a later minor one, PTX (compute_80) on everything later,
    an "a" architecture (sm_90a) on exactly its own. Source: CUDA C++ programming guide, "Compute capabilities"; torch._C's
    own check (torch/cuda/__init__.py, _check_capability) is looser and only warns.
    """
    for entry in architectures:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", entry)
        if parts is None:
            continue
        kind, its_major, its_minor, special = parts[1], int(parts[2]), int(parts[3]), parts[4]
        if special == "a":
            runs = (its_major, its_minor) == (major, minor)
        elif kind == "compute":
            runs = (its_major, its_minor) <= (major, minor)
        else:
            runs = its_major == major and its_minor <= minor
        if runs:
            return True
    return False


def driver_is_older(facts: Facts) -> bool:
    """Whether the driver's CUDA is older than torch's. Within a major version that can still work, so a matmul decides."""
    if not facts.driver_cuda or not facts.torch_cuda:
        return False
    return _numbers(facts.driver_cuda) < _numbers(facts.torch_cuda)


def _install_cuda_build(node: Node, facts: Facts) -> str:
    """CUDA 12.8 builds know every card from Turing to Blackwell; CUDA 13 builds need a driver that knows CUDA 13."""
    build = "cu130" if facts.driver_cuda and _numbers(facts.driver_cuda) >= (13, 0) else "cu128"
    # The old version may not exist for the newer CUDA; which one does is pip's to find.
    return pip_install(
        node, ["torch"], f"--upgrade --force-reinstall --index-url https://download.pytorch.org/whl/{build} "
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
