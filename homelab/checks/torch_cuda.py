"""What torch makes of the cards: is it a CUDA build, does the driver suit it, has it kernels for them, does it compute?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from homelab import hardware, torch_builds
from homelab.checks.check import Check, OfNode, Problem
from homelab.checks.commands import as_root, on_node, path_word, pip_install
from homelab.checks.evidence import Evidence
from homelab.checks.gpu_driver import install_driver
from homelab.config.cluster import Node
from homelab.config.recipe import Recipe
from homelab.facts import Facts

KERNELS, COMPUTE, BF16, TORCH = "gpu.kernels", "gpu.compute", "gpu.bf16", "gpu.torch"


def first_cause(recipe: Recipe | None, node: Node, facts: Facts) -> Iterator[tuple[str, Problem]]:
    """(id of a check, what it found) of what keeps torch from computing on this node's cards.

    The first cause only: the others would follow from it.
    """
    torch = facts.packages.get("torch")
    if not torch or not facts.gpus:
        return  # the python check and the inventory say so
    driver_hint = install_driver(node, facts)
    if not facts.torch_cuda and not re.search(r"\+(cu|rocm)\d", torch) and not _sees_cards(facts):
        yield TORCH, _other_build(node, facts, f"torch {torch} is a build without CUDA")
        return
    probe = facts.gpu_probe
    if probe is None:
        question = f"{path_word(node.python)} -c 'import torch; print(torch.randn(2, 2, device=\"cuda\"))'"
        message = "torch did not answer when it was asked for the GPUs"
        yield TORCH, Problem("fail", message, on_node(node, question))
        return
    if probe.get("not_asked"):
        return  # a run of ours computes there: the cards are well, and have no room for a question
    devices: list[dict[str, Any]] = list(probe.get("devices") or [])
    found = list(_kernels(node, facts, probe, devices))
    failed = [device for device in devices if not device.get("matmul_ok")]
    if not found and (failed or not probe.get("cuda_available")) and driver_is_older(facts):
        message = f"the driver ({facts.driver_version}) goes up to CUDA {facts.driver_cuda}, torch {torch} wants {facts.torch_cuda}"
        found = [(TORCH, Problem("fail", message, driver_hint))]
    if not found and not probe.get("cuda_available"):
        found = [(TORCH, Problem("fail", f"torch {torch} sees no GPU, though nvidia-smi does", driver_hint))]
    if not found and len(devices) < len(facts.gpus):
        message = f"torch sees {len(devices)} of {len(facts.gpus)} GPUs"
        hint = f"look for CUDA_VISIBLE_DEVICES: {on_node(node, 'env | grep CUDA')}"
        found = [(TORCH, Problem("fail", message, hint))]
    if not found:
        for device in failed:
            why = device.get("error") or "its result was wrong"
            message = f"a small matmul failed on {device.get('name')}: {why}"
            found.append((COMPUTE, Problem("fail", message, _mend_compute(node, facts))))
    if not found and recipe and recipe.method and recipe.method.kind == "qlora":
        found = list(_four_bit(node, facts, devices))
    yield from found
    if not found and recipe and recipe.train and recipe.train.precision == "bf16":
        for device in devices:
            if not device.get("bf16"):
                hint = 'edit the recipe: [train] precision = "auto" (or "fp16")'
                yield BF16, Problem("fail", f"{device.get('name')} has no bf16", hint)


def _mend_compute(node: Node, facts: Facts) -> str:
    """A card in another compute mode than "Default" refuses a second process; else somebody has to look."""
    closed = [card.index for card in facts.gpus if card.compute_mode not in (None, "Default")]
    return as_root(node, facts, f"nvidia-smi -i {closed[0]} -c 0") if closed else on_node(node, "nvidia-smi")


def _four_bit(node: Node, facts: Facts, devices: list[dict[str, Any]]) -> Iterator[tuple[str, Problem]]:
    """Cards on which a 4-bit layer of bitsandbytes did not run. Not tried (an older answer, no bitsandbytes at all) is no finding."""
    version = facts.packages.get("bitsandbytes")
    for device in devices:
        if version and device.get("four_bit_ok") is False:
            why = device.get("four_bit_error") or "its result was no number"
            message = f"a 4-bit layer of bitsandbytes {version} failed on {device.get('name')}: {why}"
            yield (
                COMPUTE,
                Problem(
                    "fail", message, fix=pip_install(node, ["bitsandbytes"], "--upgrade --force-reinstall --no-deps ")
                ),
            )
            return  # one installation, one fault


def _sees_cards(facts: Facts) -> bool:
    return bool(facts.gpu_probe and facts.gpu_probe.get("cuda_available"))


def _kernels(
    node: Node, facts: Facts, probe: dict[str, Any], devices: list[dict[str, Any]]
) -> Iterator[tuple[str, Problem]]:
    """Cards for which this build holds no kernels: torch's own architecture list against the cards' capability."""
    architectures = [str(entry) for entry in probe.get("arch_list") or []]
    seen = set()
    for device in devices:
        capability = device.get("capability")
        if not (architectures and isinstance(capability, list | tuple) and len(capability) == 2):
            continue
        major, minor = int(capability[0]), int(capability[1])
        if (major, minor) in seen or torch_builds.has_kernels(architectures, major, minor):
            continue
        seen.add((major, minor))
        version = probe.get("torch") or facts.packages.get("torch")
        message = f"torch {version} has no kernels for {device.get('name')} (sm_{major}{minor})"
        yield KERNELS, _other_build(node, facts, message)


def driver_is_older(facts: Facts) -> bool:
    """Whether the driver's CUDA is older than torch's. Within a major version that can still work, so a matmul decides."""
    if not facts.driver_cuda or not facts.torch_cuda:
        return False
    return _numbers(facts.driver_cuda) < _numbers(facts.torch_cuda)


def _other_build(node: Node, facts: Facts, message: str) -> Problem:
    """The build of torch that suits this node's cards and driver: of its own release where there is one, so that it stays that of the others."""
    cards = capabilities(facts)
    release = (facts.packages.get("torch") or "").partition("+")[0]
    if torch_builds.build_for(release, cards, None) is None:
        release = torch_builds.TORCH
    build = torch_builds.build_for(release, cards, facts.driver_cuda)
    if build is None:
        names = ", ".join(dict.fromkeys(card.name for card in facts.gpus))
        if len(facts.gpus) == 1:
            hint = f"no build of torch {release} has kernels for {names}: train without this node (--nodes with the others), or take it out of cluster.toml"
        else:
            hint = f"edit cluster.toml, node {node.name}: gpus = [...] without the card that is left out; no build of torch {release} has kernels for all of {names}"
        return Problem("fail", message, hint)
    install = pip_install(node, [f"torch=={release}"], f"--upgrade --force-reinstall --index-url {build.index} ")
    if build.suits(facts.driver_cuda):
        return Problem("fail", message, fix=install)
    older = f"the build with its kernels ({build.tag}) needs driver {build.driver} or newer, it has {facts.driver_version}"
    return Problem("fail", message, f"{older}: {install_driver(node, facts)}; then: {install}")


def capabilities(facts: Facts) -> list[torch_builds.Capability]:
    """Compute capabilities of the node's cards, as its driver says them, else by their names; cards that nobody knows are left out: they are new."""
    found = []
    for card in facts.gpus:
        said = re.fullmatch(r"(\d+)\.(\d+)", card.compute_capability or "")
        known = hardware.lookup(card.name)
        if said:
            found.append((int(said[1]), int(said[2])))
        elif known is not None:
            found.append(known.compute_capability)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version)[:2])


def _judge_of(id: str) -> OfNode:
    """The judge of one of torch's checks: only the first cause is named, by the check that it belongs to."""

    def judge(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
        if node.gpus and facts.nvidia_smi == "ok":
            for cause, problem in first_cause(evidence.recipe, node, facts):
                if cause == id:
                    yield problem

    return judge


CHECKS = (
    Check(
        TORCH,
        "torch is a CUDA build that suits the driver, and sees all cards",
        "fail",
        "gpu",
        of_node=_judge_of(TORCH),
    ),
    Check(KERNELS, "torch has kernels for the cards", "fail", "gpu", of_node=_judge_of(KERNELS)),
    Check(
        COMPUTE, "a matmul, and for QLoRA a 4-bit layer, works on every card", "fail", "gpu", of_node=_judge_of(COMPUTE)
    ),
    Check(BF16, "the cards have bf16 where the recipe wants it", "fail", "gpu", of_node=_judge_of(BF16)),
)
