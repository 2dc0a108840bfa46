"""torchrun on every node, started over SSH by homelab's own agent. The same command can be typed by hand."""

from __future__ import annotations

import shlex

from homelab.controller.base.secrets import masked
from homelab.controller.base.shell import quote_path, quote_torchrun
from homelab.controller.launchers.base import Launcher, NodeCommand, environment_of, program_of
from homelab.controller.planning.types import LaunchSpec, NodePlan, Placement

RENDEZVOUS_TIMEOUT_S = 300


class TorchrunSsh(Launcher):
    """The launcher of `homelab launch`."""

    name = "torchrun-ssh"
    title = "torchrun on every node, over SSH"

    def render(self, spec: LaunchSpec, placement: Placement) -> tuple[NodeCommand, ...]:
        """Each node's torchrun command."""
        return tuple(
            NodeCommand(node=node.name, argv=_torchrun(spec, placement, node), environment=environment_of(spec, node))
            for node in placement.nodes
        )


def _torchrun(spec: LaunchSpec, placement: Placement, node: NodePlan) -> tuple[str, ...]:
    """The torchrun command of one node (options: torch/distributed/run.py of 2.13).

    `--max-restarts=0`: restarts are homelab's. `--redirects=3` gives every rank its own stdout and stderr file.
    """
    return (
        node.python, "-m", "torch.distributed.run",
        f"--nnodes={len(placement.nodes)}",
        f"--nproc-per-node={node.rank_count}",
        f"--node-rank={node.node_rank}",
        f"--master-addr={placement.master_address}",
        f"--master-port={placement.master_port}",
        f"--local-addr={node.lan_address}",
        f"--rdzv-id={placement.run}-{placement.attempt}",
        "--max-restarts=0",
        # A node that was started alone (its controller died meanwhile) gives up by itself; the default is 10 minutes.
        f"--rdzv-conf=timeout={RENDEZVOUS_TIMEOUT_S}",
        f"--log-dir={placement.log_dir or f'{node.run_dir}/attempts/{placement.attempt}/nodes/{node.name}/logs'}",
        "--redirects=3",
        *program_of(spec, node),
    )  # fmt: skip


def by_hand(node: NodePlan, ssh_target: str) -> str:
    """What a person would type on this node instead of the agent's start; secrets masked."""
    exports = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(masked(node.environment).items()))
    return f"# node {node.name} ({ssh_target})\ncd {quote_path(node.run_dir)} && env {exports} \\\n  {quote_torchrun(node.command)}\n"
