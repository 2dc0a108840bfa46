"""What torch makes of the cards: is it a CUDA build, does the driver suit it, has it kernels for them, does it compute?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from homelab.controller.base import torch_builds
from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence
from homelab.controller.checks.machine.install_commands import install_driver, install_packages
from homelab.controller.config.cluster import Node
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import as_root, nvidia_smi, on_node, path_word
from homelab.controller.planning.environment.torch_choice import capabilities
from homelab.shared.protocol.quantisation import INT8, NF4

_LAYERS = {NF4: ("four_bit", "a 4-bit"), INT8: ("eight_bit", "an 8-bit")}  # as in the probe's answers, and in words
KERNELS, COMPUTE, BF16, TORCH = "gpu.kernels", "gpu.compute", "gpu.bf16", "gpu.torch"


def first_cause(recipe: Recipe | None, node: Node, facts: Facts) -> Iterator[tuple[str, Problem]]:
    """(id of a check, what it found) of what keeps torch from computing on this node's cards.

    The first cause only: the others would follow from it.
    """
    torch = facts.python.packages.get("torch")
    if not torch or not facts.gpu.cards:
        return  # the python check and the inventory say so
    if not facts.python.torch_cuda and not re.search(r"\+(cu|rocm)\d", torch) and not _sees_cards(facts):
        yield TORCH, _other_build(node, facts, f"torch {torch} is a build without CUDA")
        return
    probe = facts.gpu.torch
    if probe is None:
        question = f"{path_word(node.python)} -c 'import torch; print(torch.randn(2, 2, device=\"cuda\"))'"
        message = "torch did not answer when it was asked for the GPUs"
        yield TORCH, Problem("fail", message, on_node(node, question))
        return
    if probe.get("not_asked"):
        return  # a run of ours computes there: the cards are well, and have no room for a question
    devices: list[dict[str, Any]] = list(probe.get("devices") or [])
    problems = (
        list(_kernels(node, facts, probe, devices)) or list(_unseen(node, facts, probe, devices)) or list(_wrong(node, facts, devices))
    )
    if not problems and recipe and recipe.method and recipe.method.quantisation:
        problems = list(_quantised(node, facts, devices, *_LAYERS[recipe.method.quantisation]))
    yield from problems
    if not problems and recipe and recipe.train and recipe.train.precision == "bf16":
        for device in devices:
            if not device.get("bf16"):
                hint = 'edit the recipe: [train] precision = "auto" (or "fp16")'
                yield BF16, Problem("fail", f"{device.get('name')} has no bf16", hint)


def _unseen(node: Node, facts: Facts, probe: Mapping[str, Any], devices: list[dict[str, Any]]) -> Iterator[tuple[str, Problem]]:
    """A driver that is too old for torch, or cards that torch does not see."""
    torch, sees = facts.python.packages.get("torch"), probe.get("cuda_available")
    if (not sees or not all(device.get("matmul_ok") for device in devices)) and driver_is_older(facts):
        message = f"the driver ({facts.gpu.driver_version}) supports CUDA up to {facts.gpu.driver_cuda}, and torch {torch} needs {facts.python.torch_cuda}"
        yield TORCH, Problem("fail", message, install_driver(node, facts))
    elif not sees:
        yield TORCH, Problem("fail", f"torch {torch} sees no GPU, but nvidia-smi does", install_driver(node, facts))
    elif len(devices) < len(facts.gpu.cards):
        hint = f"look for CUDA_VISIBLE_DEVICES: {on_node(node, 'env | grep CUDA')}"
        yield TORCH, Problem("fail", f"torch sees {len(devices)} of {len(facts.gpu.cards)} GPUs", hint)


def _wrong(node: Node, facts: Facts, devices: list[dict[str, Any]]) -> Iterator[tuple[str, Problem]]:
    """Cards that do not multiply two small matrices."""
    for device in devices:
        if not device.get("matmul_ok"):
            why = device.get("error") or "its result was wrong"
            yield COMPUTE, Problem("fail", f"a small matmul failed on {device.get('name')}: {why}", _fix_compute(node, facts))


def _fix_compute(node: Node, facts: Facts) -> str:
    """A card in another compute mode than "Default" refuses a second process; in other cases a person has to look."""
    closed = [card.index for card in facts.gpu.cards if card.compute_mode not in (None, "Default")]
    return as_root(node, facts, nvidia_smi(facts, f"-i {closed[0]} -c 0")) if closed else on_node(node, nvidia_smi(facts))


def _quantised(node: Node, facts: Facts, devices: list[dict[str, Any]], key: str, words: str) -> Iterator[tuple[str, Problem]]:
    """Cards on which a layer of bitsandbytes did not run. Not tried (an older answer, no bitsandbytes at all) is no finding."""
    version = facts.python.packages.get("bitsandbytes")
    for device in devices:
        if version and device.get(f"{key}_ok") is False:
            why = device.get(f"{key}_error") or "its result was not a number"
            message = f"{words} layer of bitsandbytes {version} failed on {device.get('name')}: {why}"
            yield (
                COMPUTE,
                Problem("fail", message, fix=install_packages(node, facts, ["bitsandbytes"], "--upgrade --force-reinstall --no-deps ")),
            )
            return  # one installation, one fault


def _sees_cards(facts: Facts) -> bool:
    return bool(facts.gpu.torch and facts.gpu.torch.get("cuda_available"))


def _kernels(node: Node, facts: Facts, probe: dict[str, Any], devices: list[dict[str, Any]]) -> Iterator[tuple[str, Problem]]:
    """Cards for which this build holds no kernels: torch's own architecture list against the cards' capability."""
    architectures = [str(entry) for entry in probe.get("arch_list") or []]
    judged = set()
    for device in devices:
        capability = device.get("capability")
        if not (architectures and isinstance(capability, list | tuple) and len(capability) == 2):
            continue
        major, minor = int(capability[0]), int(capability[1])
        if (major, minor) in judged or torch_builds.has_kernels(architectures, major, minor):
            continue
        judged.add((major, minor))
        version = probe.get("torch") or facts.python.packages.get("torch")
        message = f"torch {version} has no kernels for {device.get('name')} (sm_{major}{minor})"
        yield KERNELS, _other_build(node, facts, message)


def driver_is_older(facts: Facts) -> bool:
    """Whether the driver's CUDA is older than torch's. Within a major version that can still work, so a matmul decides."""
    if not facts.gpu.driver_cuda or not facts.python.torch_cuda:
        return False
    return _numbers(facts.gpu.driver_cuda) < _numbers(facts.python.torch_cuda)


def _other_build(node: Node, facts: Facts, message: str) -> Problem:
    """The build of torch that suits this node's cards and driver: of its own release where there is one, so that it stays that of the others."""
    cards = capabilities(facts)
    release = (facts.python.packages.get("torch") or "").partition("+")[0]
    if torch_builds.build_for(release, cards, None) is None:
        release = torch_builds.TORCH
    build = torch_builds.build_for(release, cards, facts.gpu.driver_cuda)
    if build is None:
        names = ", ".join(dict.fromkeys(card.name for card in facts.gpu.cards))
        if len(facts.gpu.cards) == 1:
            hint = f"no build of torch {release} has kernels for {names}: train without this node (--nodes with the others), or take it out of cluster.toml"
        else:
            hint = f"edit cluster.toml, node {node.name}: gpus = [...] without the card that is left out; no build of torch {release} has kernels for all of {names}"
        return Problem("fail", message, hint)
    install = install_packages(node, facts, [f"torch=={release}"], f"--upgrade --force-reinstall --index-url {build.index} ")
    if build.suits(facts.gpu.driver_cuda):
        return Problem("fail", message, fix=install)
    older = f"the build with its kernels ({build.tag}) needs driver {build.driver} or newer, and it has {facts.gpu.driver_version}"
    return Problem("fail", message, f"{older}: {install_driver(node, facts)}; then: {install}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version)[:2])


@check(TORCH, "torch is a CUDA build that works with the driver, and sees all cards", worst="fail", sees="gpu", after="gpu.memory")
def build(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where torch cannot use CUDA on the node."""
    yield from _caused(TORCH, evidence, node, facts)


@check(KERNELS, "torch has kernels for the cards", worst="fail", sees="gpu")
def kernels(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the build has no kernels for a card."""
    yield from _caused(KERNELS, evidence, node, facts)


@check(COMPUTE, "a matmul, and for a quantised base its kind of layer, works on every card", worst="fail", sees="gpu")
def compute(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a card does not compute."""
    yield from _caused(COMPUTE, evidence, node, facts)


@check(BF16, "the cards have bf16 if the recipe needs it", worst="fail", sees="gpu")
def bf16(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the recipe wants bf16 and a card has none."""
    yield from _caused(BF16, evidence, node, facts)


def _caused(id: str, evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """Only the first cause is named, by the check that it belongs to."""
    if node.gpus and facts.gpu.nvidia_smi == "ok":
        for cause, problem in first_cause(evidence.recipe, node, facts):
            if cause == id:
                yield problem
