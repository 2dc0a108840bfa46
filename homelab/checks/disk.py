"""disk: the workdir can be written, and has room for the checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks import training_size
from homelab.checks.commands import answered, decimal_size, on_node, path_word
from homelab.checks.evidence import Evidence, Finding
from homelab.config.cluster import Node
from homelab.config.recipe import Recipe
from homelab.facts import Facts

ID = "disk"
_GB = 10**9
FLOOR_BYTES = _GB // 2  # logs, metrics, code, shipped data
MARGIN_BYTES = _GB


def judge(evidence: Evidence) -> Iterator[Finding]:
    """fail where the checkpoints cannot fit, warn where there is less than 1 GB beyond."""
    for node, facts in answered(evidence):
        found = list(_of_node(evidence.recipe, node, facts))
        free = facts.disk_free_bytes
        summary = f"{decimal_size(free)} free" if free is not None else "free space is not known"
        yield from found or [Finding(ID, node.name, "ok", summary)]


def _of_node(recipe: Recipe | None, node: Node, facts: Facts) -> Iterator[Finding]:
    if not facts.workdir_writable:
        message = f"{facts.user} cannot write to the workdir {facts.workdir}"
        hint = f'{on_node(node, f"ls -ld {path_word(node.workdir)}")}; or edit cluster.toml, node {node.name}: workdir = "..."'
        yield Finding(ID, node.name, "fail", message, hint)
    free = facts.disk_free_bytes
    if free is None:
        return
    must, should, what = room_needed(recipe, facts)
    if free < should:
        message = (
            f"{decimal_size(free)} free for {facts.workdir}, {what} {decimal_size(must if free < must else should)}"
        )
        show = f"df -h {path_word(node.workdir)}; du -sh {path_word(node.workdir + '/runs')}/*"
        hint = f'{on_node(node, show)}; delete old runs there, or edit cluster.toml, node {node.name}: workdir = "..."'
        yield Finding(ID, node.name, "fail" if free < must else "warn", message, hint)


def room_needed(recipe: Recipe | None, facts: Facts) -> tuple[int, int, str]:
    """(bytes below which it fails, bytes below which it is tight, words for what needs them).

    Checkpoints are 3 x the trained weights in fp32 (weights, two moments); `keep` of them lie there while one more is written, and
    at the end the trained weights once more. A hub model that is not there yet is downloaded, perhaps to the same disk: tight only.
    """
    if recipe is None:
        return FLOOR_BYTES, FLOOR_BYTES + MARGIN_BYTES, "a small run needs"
    size = training_size.of_recipe(recipe, facts)
    if size is None:
        if recipe.script is not None:
            return FLOOR_BYTES, FLOOR_BYTES + MARGIN_BYTES, "a small run needs"
        return 2 * _GB, 10 * _GB, "a model of unknown size may need"
    must = FLOOR_BYTES + (recipe.checkpoint.keep + 1) * size.checkpoint_bytes + 4 * size.trainable_parameters
    download = 2 * size.parameters if facts.model is not None and not facts.model.found else 0
    return must, must + MARGIN_BYTES + download, "this recipe needs"
