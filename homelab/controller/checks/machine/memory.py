"""memory: the machine's RAM, shared memory and open files. Whether a step fits is the plan's to say, item by item."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.hint import Hint
from homelab.controller.base.units import GIB, binary_size
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence, Level
from homelab.controller.checks.machine import training_size
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import as_root, on_node, written_as_root
from homelab.controller.planning.memory.rank_memory import PROCESS_BYTES
from homelab.controller.planning.strategy import registry
from homelab.shared.protocol.quantisation import stored_of

# A process with CUDA's libraries loaded; weights go straight to the card, shard by shard, from a memory map. An assumption.
CUDA_PROCESS_BYTES = 2 * GIB
_TIGHT = 1.1
MIB = 2**20
SHM_WARN_BYTES = 64 * MIB  # Docker's default for a container; NCCL and data loaders need more
SHM_FAIL_BYTES = 16 * MIB
OPEN_FILES = 1024  # the default of a login on most systems
MORE_FILES = 65536


@check("memory.ram", "enough memory is free, for this login too", worst="fail", sees="system")
def ram(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail when what a node must hold in any case does not fit into the free memory, warn when it fits by less than 10 %. A plan says more: `fit.memory`."""
    available = available_bytes(facts)
    if available is None:
        return
    need = least_bytes(evidence, node, facts)
    if available >= _TIGHT * need:
        return
    level: Level = "fail" if available < need else "warn"
    limit = facts.system.memory_limit_bytes
    if limit is not None and facts.system.memory_available_bytes is not None and available < facts.system.memory_available_bytes:
        message = f"{binary_size(available)} of memory is free for this login (its control group is limited to {binary_size(limit)}), this needs at least {binary_size(need)}"
        raised = as_root(node, facts, f"systemctl set-property user-{_uid_word(facts)}.slice MemoryMax=infinity MemoryHigh=infinity")
        yield Problem(level, message, f"raise the limit of the container or of the user: {raised}")
        return
    message = f"{binary_size(available)} of memory is free, this needs at least {binary_size(need)}"
    hint = f"close the programs that use it; to see them: {on_node(node, 'ps -eo rss,user,args --sort=-rss | head')}"
    if evidence.recipe and evidence.recipe.method and not node.gpus:
        is_quantised = stored_of(facts.model.config if facts.model else None) is not None
        hint += "; or edit the recipe: a smaller [model]" + (
            ', or [method] kind = "qlora"' if evidence.recipe.method.kind != "qlora" and not is_quantised else ""
        )
    yield Problem(level, message, hint)


@check(
    "memory.shm", f"/dev/shm has more than {SHM_WARN_BYTES // MIB} MiB free if NCCL or data loaders need it", worst="fail", sees="resources"
)
def shared(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """/dev/shm, where NCCL and the workers of data loaders put what they share. The built-in worker on CPUs needs none."""
    free = facts.resources.shm_free_bytes
    if free is None or free > SHM_WARN_BYTES or not (node.gpus or (evidence.recipe and evidence.recipe.script)):
        return
    size = f"{free / MIB:.0f} MiB"
    message = f"{size} free in /dev/shm: NCCL and the processes of data loaders end with a bus error, or report that no space is left"
    bigger = as_root(node, facts, "mount -o remount,size=50% /dev/shm")
    hint = f"to see what fills it: {on_node(node, 'df -h /dev/shm; ls -l /dev/shm')}; make it larger: {bigger}; in a container: docker run --shm-size=8g"
    yield Problem("fail" if free < SHM_FAIL_BYTES else "warn", message, hint)


@check("memory.open_files", f"{OPEN_FILES} files may be open at once", worst="warn", sees="resources")
def open_files(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a login that may open unusually few files: every connection and every shard of the data is one."""
    soft, hard = facts.resources.open_files_soft, facts.resources.open_files_hard
    if soft is not None and soft < OPEN_FILES:
        limit_text = "no limit" if hard is None else str(hard)
        lines = [
            f"{facts.system.user} - nofile {MORE_FILES}"
            if hard is not None and hard < MORE_FILES
            else f"{facts.system.user} soft nofile {MORE_FILES}"
        ]
        write = on_node(node, written_as_root(facts, lines, "/etc/security/limits.conf", append=True))
        yield Problem(
            "warn", f"at most {soft} files may be open at once (hard limit: {limit_text})", Hint("{}; then log in again", write), write
        )


def available_bytes(facts: Facts) -> int | None:
    """What a new process may take: the machine's free memory, or less where a control group limits the login."""
    free = facts.system.memory_available_bytes
    if free is None or facts.system.memory_limit_bytes is None:
        return free
    return min(free, max(0, facts.system.memory_limit_bytes - (facts.system.memory_limit_used_bytes or 0)))


def least_bytes(evidence: Evidence, node: Node, facts: Facts) -> int:
    """A lower bound of the RAM this node's ranks hold. Of a CPU node that is the training, too, where each of several nodes holds all of it."""
    if node.gpus:
        return CUDA_PROCESS_BYTES * node.rank_count
    # "auto" takes what has room, other strategies divide the weights, and one node alone may have a part of them on its disk.
    strategy = registry.STRATEGIES.get(evidence.recipe.parallel.strategy) if evidence.recipe is not None else None
    is_whole = strategy is not None and not (strategy.is_per_pass or strategy.cuts_layers) and len(evidence.cluster.nodes) > 1
    size = training_size.of_recipe(evidence.recipe, facts) if is_whole else None
    return PROCESS_BYTES + (size.training_bytes if size else 0)


def _uid_word(facts: Facts) -> str:
    return "0" if facts.system.user == "root" else "$(id -u)"


@subject("memory", "there is memory to load the model", after="disk")
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    available = available_bytes(facts)
    return f"{binary_size(available)} free" if available is not None else "free memory is not known"
