"""A short torchrun job on the nodes of a plan: what its nodes are told, their lines as they come, and its end everywhere.

The agents watch it (`homelab.node.collective_check`): it ends with its torchrun, with their connection to the controller, or when its time is over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from homelab.controller.base.errors import EXIT_UNREACHABLE
from homelab.controller.launchers.torchrun_ssh import TorchrunSsh
from homelab.controller.planning.types import LaunchSpec, Plan
from homelab.controller.remote.fanout import Fleet, on_all
from homelab.controller.remote.session import Stream
from homelab.shared.protocol.collective_messages import CollectiveRequest, JobRequest

NodeLine = tuple[str, bytes | None]  # node, its line; None: nothing more comes
READ_S = 0.5
ASK_S, _ASK_SILENT_S = 8.0, 2.0


def request(plan: Plan, name: str, job: str, program: Iterable[str]) -> CollectiveRequest:
    """What a node is told: to start `program` as the launch starts its own, under another name and with another place for logs."""
    nodes = [
        node.model_copy(update={"python": node.command[0], "environment": {**node.environment, "HOMELAB_RUN": job}}) for node in plan.nodes
    ]
    spec = LaunchSpec(
        arguments=tuple(program), script=None, code="", inputs=(), processes_per_node=tuple(node.rank_count for node in nodes), environment={},
        node_environment={},
    )  # fmt: skip
    placement = plan.placement.model_copy(update={"run": job, "nodes": tuple(nodes), "log_dir": "logs"})
    (command,) = (command for command in TorchrunSsh().render(spec, placement) if command.node == name)
    return CollectiveRequest(
        name=job,
        command=tuple(command.argv),
        environment=dict(command.environment),
        ranks=plan.node(name).rank_count,
        head_port=plan.master_port,
    )


@contextmanager
def listening(streams: Mapping[str, Stream]) -> Iterator[queue.Queue[NodeLine]]:
    """The lines of all nodes as they come."""
    lines: queue.Queue[NodeLine] = queue.Queue()
    over = threading.Event()
    readers = [threading.Thread(target=_read, args=(name, stream, lines, over), daemon=True) for name, stream in streams.items()]
    try:
        for reader in readers:
            reader.start()
        yield lines
    finally:
        over.set()
        for reader in readers:
            reader.join(2 * READ_S)


def _read(name: str, stream: Stream, lines: queue.Queue[NodeLine], over: threading.Event) -> None:
    while not over.is_set():
        try:
            line = stream.readline(READ_S)
        except TimeoutError:
            continue
        except (OSError, ValueError):
            line = b""
        lines.put((name, line or None))
        if not line:
            return


def end(fleet: Fleet, job: str, names: Iterable[str], silent: set[str]) -> list[str]:
    """End what is left of the job on these nodes; those where that could not be seen.

    A connection that broke under the job is opened anew. From `silent` nodes little is hoped for.
    """
    names = list(names)

    def ask(name: str) -> dict[str, Any]:
        if name in silent:
            return fleet.agent(name).ask("collective-end", JobRequest(name=job), timeout_s=_ASK_SILENT_S)
        answers, errors = fleet.ask("collective-end", JobRequest(name=job), names=[name], timeout_s=ASK_S)
        if name in errors and errors[name].exit_code == EXIT_UNREACHABLE:
            answers, errors = fleet.ask("collective-end", JobRequest(name=job), names=[name], timeout_s=ASK_S)
        for error in errors.values():
            raise error
        return answers[name]

    answers, _ = on_all(names, ask)
    return [name for name in names if name not in answers or answers[name]["left"]]
