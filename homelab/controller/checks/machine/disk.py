"""disk: the workdir can be written, and has room for the checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.units import decimal_size
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence, answered
from homelab.controller.checks.machine import training_size
from homelab.controller.config.cluster import Node
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import as_root, on_node, path_word

_GB = 10**9
FLOOR_BYTES = _GB // 2  # logs, metrics, code, shipped data
MARGIN_BYTES = _GB
# A run writes some hundred files, and pip some ten thousand.
INODES_FAIL = 1_000
INODES_WARN = 20_000
TEMPORARY_BYTES = 50 * 10**6  # torch and torchrun write sockets, logs and compiled kernels there
_READ_ONLY = "Read-only file system"


@check("disk.writable", "the workdir can be written", worst="fail", sees="resources", is_certain=True)
def writable(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where no file can be made in the workdir, whatever forbids it but a read-only file system."""
    if not facts.resources.workdir_writable and facts.resources.workdir_problem != _READ_ONLY:
        why = f": {facts.resources.workdir_problem}" if facts.resources.workdir_problem else ""
        message = f"{facts.system.user} cannot write to the workdir {facts.resources.workdir}{why}"
        yield Problem("fail", message, f"{on_node(node, f'ls -ld {path_word(node.workdir)}')}; {_elsewhere(node)}")


@check("disk.readonly", "the workdir's disk is not mounted read-only", worst="fail", sees="resources", after="disk.own", is_certain=True)
def read_only(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the workdir's file system is mounted read-only: the kernel does so itself after an error of the disk."""
    if not facts.resources.workdir_writable and facts.resources.workdir_problem == _READ_ONLY:
        message = f"the disk of the workdir {facts.resources.workdir} is mounted read-only"
        command = as_root(node, facts, "dmesg | grep -iE 'remount|i/o error'")
        yield Problem("fail", message, f"is it an error of the disk? {command}; {_elsewhere(node)}")


@check("disk.room", "the disk has room for the checkpoints that the recipe keeps", worst="fail", sees="resources")
def room(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the checkpoints cannot fit, warn where there is less than 1 GB beyond."""
    free = facts.resources.disk_free_bytes
    if free is None:
        return
    must, should, purpose = room_needed(evidence.recipe, facts)
    if free < should:
        message = f"{decimal_size(free)} free for {facts.resources.workdir}, {purpose} {decimal_size(must if free < must else should)}"
        show = f"df -h {path_word(node.workdir)}; du -sh {path_word(node.workdir + '/runs')}/*"
        yield Problem("fail" if free < must else "warn", message, f"{on_node(node, show)}; delete old runs there, or {_elsewhere(node)}")


@check("disk.inodes", f"the disk can hold {INODES_WARN} more files ({INODES_FAIL}: fail)", worst="fail", sees="resources")
def inodes(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the file system can hold hardly any more files, however much space is free."""
    free = facts.resources.disk_free_inodes
    if free is not None and free < INODES_WARN:
        message = f"only {free} more files can be made on the disk of {facts.resources.workdir} (it has no free inodes, even if it has free space)"
        show = f"df -i {path_word(node.workdir)}; du --inodes -x ~ 2>/dev/null | sort -n | tail"
        yield Problem(
            "fail" if free < INODES_FAIL else "warn",
            message,
            f"{on_node(node, show)}; delete folders with many small files, or {_elsewhere(node)}",
        )


@check("disk.temporary", "temporary files have room", worst="warn", sees="resources")
def temporary(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where temporary files have no room: torchrun and torch's compiler need some."""
    free = facts.resources.temporary_free_bytes
    if facts.resources.temporary_folder and free is not None and free < TEMPORARY_BYTES:
        message = f"{decimal_size(free)} free for temporary files in {facts.resources.temporary_folder}"
        show = (
            f"df -h {path_word(facts.resources.temporary_folder)}; du -xsh {path_word(facts.resources.temporary_folder)}/* | sort -h | tail"
        )
        yield Problem("warn", message, f"{on_node(node, show)}; delete old files there")


@check("disk.cache", "a model that has to be downloaded fits on the disk of the Hub's cache", worst="fail", sees="resources")
def cache(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a model has to be downloaded and the disk of the Hub's cache, another than the workdir's, cannot hold it."""
    free, needed = facts.resources.cache_free_bytes, _download_bytes(evidence.recipe, facts)
    if free is not None and needed and free < needed:
        message = f"the model is not there yet: it needs {decimal_size(needed)}, and the disk of the Hub's cache has {decimal_size(free)}"
        show = on_node(node, f"df -h; du -sh {path_word(facts.resources.cache_folder)}/*")
        yield Problem("fail", message, f"{show}; delete old models there, or set HF_HOME to a folder of a larger disk")


@check("disk.own", "no two nodes have one workdir", worst="fail", sees="resources", after="disk.writable")
def own(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where two nodes of cluster.toml are one machine with one workdir, or share it over the network: their files would overwrite each other's."""
    first, marked = dict[str, str](), dict[str, str]()
    for node, facts in answered(evidence):
        mark = facts.resources.workdir_mark
        sharer = marked.setdefault(mark, node.name) if mark else node.name
        if sharer != node.name and first.get(facts.resources.workdir_identity or "") != sharer:
            message = f"it shares its workdir {facts.resources.workdir} with {sharer}, over the network"
            hint = f'edit cluster.toml, node {node.name}: workdir = "~/homelab-{node.name}" (or better a folder of its own disk)'
            yield node.name, Problem("fail", message, hint)
            continue
        identity = facts.resources.workdir_identity
        if identity is None:
            continue
        other = first.setdefault(identity, node.name)
        if other != node.name:
            message = f"it is the same machine as {other}, with the same workdir {facts.resources.workdir}"
            yield (
                node.name,
                Problem(
                    "fail",
                    message,
                    f"edit cluster.toml: take {node.name} or {other} out (several cards of one machine stand in one node's gpus)",
                ),
            )


def room_needed(recipe: Recipe | None, facts: Facts) -> tuple[int, int, str]:
    """(bytes below which it fails, bytes below which it is tight, words for what needs them).

    Checkpoints are 3 x the trained weights in fp32 (weights, two moments); `keep` of them lie there while one more is written, and
    at the end the trained weights once more. A hub model that is not there yet is downloaded, perhaps to the same disk, and a quantised base is kept: tight only.
    """
    if recipe is None:
        return FLOOR_BYTES, FLOOR_BYTES + MARGIN_BYTES, "a small run needs"
    size = training_size.of_recipe(recipe, facts)
    if size is None:
        if recipe.script is not None:
            return FLOOR_BYTES, FLOOR_BYTES + MARGIN_BYTES, "a small run needs"
        return 2 * _GB, 10 * _GB, "a model of unknown size may need"
    every, steps = recipe.checkpoint.keep_every, recipe.train.steps if recipe.train is not None else None
    kept_steps = steps // every if every is not None and steps is not None else 0
    must = FLOOR_BYTES + (recipe.checkpoint.keep + 1 + kept_steps) * size.checkpoint_bytes + 4 * size.trainable_parameters
    download = _download_bytes(recipe, facts) if facts.resources.cache_free_bytes is None else 0
    # Quantised weights are kept for the next start where there is room for them (homelab/worker/model/quantised_cache.py).
    quantised = size.weights_bytes if recipe.method is not None and recipe.method.kind == "qlora" else 0
    return must, must + MARGIN_BYTES + download + quantised, "this recipe needs"


def _download_bytes(recipe: Recipe | None, facts: Facts) -> int:
    """What the Hub will send: two bytes a parameter. 0 where nothing is downloaded, or its size is not known."""
    size = training_size.of_recipe(recipe, facts)
    return 2 * size.parameters if size is not None and facts.model is not None and not facts.model.found else 0


def _elsewhere(node: Node) -> str:
    return f'edit cluster.toml, node {node.name}: workdir = "..."'


@subject("disk", "there is room for the run's files", after="network")
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    free = facts.resources.disk_free_bytes
    return f"{decimal_size(free)} free" if free is not None else "free space is not known"
