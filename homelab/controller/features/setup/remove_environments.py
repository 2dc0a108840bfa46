"""The sequence of `homelab teardown`: what setup has made on the nodes goes, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, chain, homelab
from homelab.controller.base.say import Say
from homelab.controller.base.units import listed
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node_commands import on_node, path_word
from homelab.controller.facts.reading import read
from homelab.controller.features.setup import setup_nodes
from homelab.controller.remote.fanout import Fleet, Outcome, on_all
from homelab.shared.protocol.setup_messages import SetupRemoved

_REMOVE_TIMEOUT_S = 600.0


def made(fleet: Fleet, names: Iterable[str]) -> Outcome[tuple[str, ...]]:
    """The folders that setup has made, by node."""
    return on_all(names, lambda name: setup_nodes.look(fleet.agent(name), {}).folders)


def forget_secrets(fleet: Fleet, names: Iterable[str]) -> dict[str, list[str]]:
    """Node -> the runs that were over, and of which it still had secrets: they are gone. Nodes that do not answer are left out."""
    answers, _ = fleet.ask("runs", names=list(names))
    return {name: list(answer["secrets_removed"]) for name, answer in answers.items() if answer["secrets_removed"]}


def remove(fleet: Fleet, names: Iterable[str], say: Say) -> Outcome[SetupRemoved]:
    """Remove them. A node where a run lives keeps its environment."""

    def one(name: str) -> SetupRemoved:
        setup_nodes.refuse_while_runs_live(fleet.agent(name))
        removed = read(
            SetupRemoved,
            setup_nodes.when_free(
                lambda: fleet.agent(name).ask("setup-remove", timeout_s=_REMOVE_TIMEOUT_S),
                lambda: say(f"{name}: waiting for a setup that is working on this node"),
            ),
        )
        if removed.left:
            raise _left(fleet.cluster.node(name), removed)
        return removed

    return on_all(names, one)


def _left(node: Node, removed: SetupRemoved) -> HomelabError:
    """What stays on the node, and what a person does about it: another teardown would find the same."""
    again, others = homelab("teardown", node.name), [path for path in removed.left if path not in removed.links]
    if others:
        return HomelabError(
            f"these folders could not be removed: {listed(others)}", where=f"node {node.name}",
            hint=Hint(
                "are they still in use, or is your home or the workdir in them? {} shows them. Remove by hand what you do not need, then: {}",
                on_node(node, f"ls -la {' '.join(map(path_word, others))}"), again,
            ),
        )  # fmt: skip
    moved = [f"{path}, which leads to {target}" for path, target in removed.links.items()]
    words = " ".join(path_word(path) for path in [*removed.links.values(), *removed.links])
    return HomelabError(
        f"teardown follows no link: {listed(moved)}", where=f"node {node.name}",
        hint=Hint("if nothing else is in there: {}", chain(on_node(node, f"rm -rf {words}"), again)),
    )  # fmt: skip
