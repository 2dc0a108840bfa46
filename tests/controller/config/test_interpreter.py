"""Unsloth has an environment of its own: which Python trains what."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from homelab.controller.checks import registry
from homelab.controller.config import interpreter
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.config.load import cluster_text
from homelab.controller.config.recipe import Recipe
from homelab.controller.remote.agent import Agent
from homelab.controller.remote.fanout import Fleet
from tests.controller.checks import healthy

pytestmark = pytest.mark.timeout(20)

REPOSITORY = Path(__file__).parents[3]
NODES = (Node(name="a", host="a", python="/env/bin/python"), Node(name="b", host="b", unsloth_python="/opt/unsloth/bin/python"))
CLUSTER = Cluster(nodes=NODES, known_hosts="/known")


def pythons(cluster: Cluster) -> list[str]:
    return [node.python for node in cluster.nodes]


def recipe(backend: str) -> Recipe:
    return healthy.recipe(method={"kind": "lora", "backend": backend})


def test_only_a_recipe_that_asks_for_it_trains_there() -> None:
    for other in (None, healthy.script(), recipe("auto"), recipe("transformers")):
        assert interpreter.for_recipe(CLUSTER, other) is CLUSTER
        assert interpreter.key_of(other) == "python"
    found = interpreter.for_recipe(CLUSTER, recipe("unsloth"))
    assert pythons(found) == ["~/.homelab/unsloth/bin/python", "/opt/unsloth/bin/python"]
    assert interpreter.key_of(recipe("unsloth")) == "unsloth_python"
    assert [node.known_hosts for node in found.nodes] == ["/known", "/known"], "hints still name it"
    assert pythons(interpreter.for_recipe(found, recipe("unsloth"))) == pythons(found), "twice is the same"
    again = Cluster.model_validate({**tomllib.loads(cluster_text(found))["cluster"], "nodes": found.nodes})
    assert pythons(again) == pythons(found), "a supervisor on the head is given the same"


def test_agents_that_are_connected_already_are_asked_with_it() -> None:
    fleet = Fleet(CLUSTER)
    agent = Agent(NODES[1], None)  # type: ignore[arg-type]
    fleet._agents["b"] = agent
    fleet.train_with(recipe("transformers"))
    assert agent.node is NODES[1]
    fleet.train_with(recipe("unsloth"))
    assert agent.node.python == "/opt/unsloth/bin/python" and "/opt/unsloth/bin/python" in agent._command("facts")


def test_what_hints_install_is_what_was_tested() -> None:
    text = (REPOSITORY / "homelab" / "controller" / "features" / "setup" / "unsloth-packages.txt").read_text(encoding="utf-8")
    pins = {name.lower().replace("_", "-"): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.M)}
    assert interpreter.UNSLOTH_VERSIONS.items() <= pins.items()
    assert "torch" in interpreter.UNSLOTH_VERSIONS and "unsloth" in interpreter.UNSLOTH_VERSIONS


def test_full_training_by_unsloth_is_refused() -> None:
    with pytest.raises(ValueError, match="trains adapters"):
        healthy.recipe(method={"kind": "full", "backend": "unsloth"})


def test_nodes_that_have_nothing_are_told_to_install_what_was_tested() -> None:
    seen = healthy.gpu(recipe("unsloth"), names=healthy.NAMES[:1])
    seen = healthy.with_facts(seen, healthy.NAMES[0], python={"is_another": True, "executable": "/usr/bin/python3", "packages": {}})
    seen = replace(seen, cluster=interpreter.for_recipe(seen.cluster, seen.recipe))
    (finding,) = [found for found in registry.judge_all(seen, ()) if found.check == "python.interpreter"]
    assert "there is no Python at ~/.homelab/unsloth/bin/python" in finding.message
    assert finding.fix == f"homelab setup {healthy.NAMES[0]} --unsloth"
    assert 'unsloth_python = "..."' in finding.hint
