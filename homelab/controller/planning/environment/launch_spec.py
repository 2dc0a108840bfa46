"""What is started on the nodes: the program, its environment and each node's own part of it.

Sources: torch/distributed (2.13), NCCL's documentation of environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from homelab.controller.config.cluster import Node
from homelab.controller.config.recipe import Recipe, ScriptRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.environment import cuda, personal
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.machines import cards
from homelab.controller.planning.machines.lan_address import LanAddress
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.types import LaunchSpec, NodePlan


def of(inputs: PlanInputs, machines: Machines, settings: Mapping[str, str]) -> LaunchSpec:
    """What is started for this recipe. `settings` are the strategy's variables."""
    recipe = inputs.recipe
    is_script = isinstance(recipe, ScriptRecipe)
    saved: dict[str, Literal["saved_dir"]] = {"HOMELAB_CHECKPOINT_DIR": "saved_dir"} if is_script else {}
    return LaunchSpec(
        arguments=_arguments(recipe, inputs.script),
        script=inputs.script if is_script else None,
        code=inputs.code,
        inputs=(inputs.code, *inputs.files),
        processes_per_node=tuple(machines.ranks_on(node) for node in machines.nodes),
        environment={
            "PYTHONUNBUFFERED": "1",
            "HOMELAB_RUN": inputs.run,
            "HOMELAB_ATTEMPT": str(inputs.attempt),
            **settings,
            # Nothing of this run is on the hub: the worker does not ask it.
            **({} if _needs_hub(recipe) else {"HF_HUB_OFFLINE": "1"}),
        },
        # The interface is given per node: names differ between machines, and a wrong guess of gloo hangs without a message.
        node_environment={
            "PYTHONPATH": "code_dir",
            "HOMELAB_RUN_DIR": "run_dir",
            "HOMELAB_NODE": "name",
            "GLOO_SOCKET_IFNAME": "interface",
            **saved,
        },
    )


def node_plans(
    inputs: PlanInputs, machines: Machines, addresses: Mapping[str, LanAddress], of_wire: Mapping[str, str]
) -> tuple[NodePlan, ...]:
    """Each node's part, without the variables that all nodes have. `of_wire` are those of the network profile. Raises InputError where nodes differ in what NCCL wants equal."""
    plans = tuple(_node_plan(inputs, machines, rank, node, addresses[node.name], of_wire) for rank, node in enumerate(machines.nodes))
    if machines.device == "cuda":
        personal.refuse_unequal({plan.name: plan.environment for plan in plans})
    return plans


def _node_plan(inputs: PlanInputs, machines: Machines, rank: int, node: Node, address: LanAddress, of_wire: Mapping[str, str]) -> NodePlan:
    facts, count = machines.facts.get(node.name), machines.ranks_on(node)
    workdir = facts.resources.workdir if facts else node.workdir
    run_dir = f"{workdir}/runs/{inputs.run}"
    if machines.device == "cuda":
        node_dir = f"{run_dir}/attempts/{inputs.attempt}/nodes/{node.name}"
        defaults = {"OMP_NUM_THREADS": "4", **of_wire} | cuda.environment(
            node, facts, address=address.address, interface=address.interface, node_dir=node_dir
        )
    else:
        defaults = {"OMP_NUM_THREADS": str(max(1, (facts.system.cpu_count if facts else 1) // count))}
    return NodePlan(
        name=node.name, node_rank=rank, lan_address=address.address, interface=address.interface, rank_count=count, workdir=workdir, run_dir=run_dir,
        environment=personal.merged(defaults, inputs.recipe, node), python=_python(node, facts), spare_cards=cards.spare(facts),
    )  # fmt: skip


def _arguments(recipe: Recipe, script: str | None) -> tuple[str, ...]:
    if not isinstance(recipe, ScriptRecipe):
        return ("-m", "homelab.worker")
    return recipe.script.args if script else (recipe.script.path, *recipe.script.args)


def _needs_hub(recipe: Recipe) -> bool:
    if isinstance(recipe, ScriptRecipe):
        return True
    return not recipe.model.is_folder or any((name or "").startswith("hub:") for name in (recipe.data.train, recipe.data.eval))


def _python(node: Node, facts: Facts | None) -> str:
    """The configured interpreter with the node's own home in place of `~/`: the command must mean the same in any shell."""
    if facts and node.python.startswith("~/"):
        return facts.system.home.rstrip("/") + node.python[1:]
    return node.python
