"""The sequence of `homelab setup`: look, resolve, fetch, send, make. What is to be done is decided in `homelab.controller.features.setup`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TypeVar

from homelab.controller.base.errors import BusyError, HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.models import DisplayValue
from homelab.controller.base.say import Say
from homelab.controller.base.units import listed
from homelab.controller.facts.node_commands import environment_of
from homelab.controller.facts.reading import read
from homelab.controller.features.setup import python_archive, setup_plan, wheelhouse
from homelab.controller.features.setup.platform import Platform, fleet_python, platform_of
from homelab.controller.features.setup.requirements import Lock
from homelab.controller.features.setup.setup_plan import SetupOptions
from homelab.controller.features.setup.supply import Supply
from homelab.controller.features.setup.transfer_progress import TransferProgress
from homelab.controller.features.setup.wanted import WantedPackages
from homelab.controller.remote.agent import Agent
from homelab.controller.remote.fanout import Fleet, Outcome, on_all
from homelab.shared.protocol.setup_messages import LookRequest, MakeRequest, SetupState

_LOOK_TIMEOUT_S = 300.0  # some gigabytes are read to their ends
_MAKE_TIMEOUT_S = 3600.0
_BUSY_LIMIT_S = 600.0
_BUSY_AGAIN_S = 2.0

T = TypeVar("T")


class NodeDone(DisplayValue):
    """What setup has found and done on a node. `difference`: in words; `sent_bytes` 0 with --check; `is_somebodys`: made by hand, and left alone."""

    difference: str
    is_whole: bool
    changed: bool
    python: str
    packages: int
    sent_bytes: int = 0
    is_somebodys: bool = False


def run(fleet: Fleet, names: Iterable[str], wanted: WantedPackages, how: SetupOptions, say: Say) -> Outcome[NodeDone]:
    """Bring these nodes to what is wanted. One node's error does not stop the others."""
    names = list(names)
    say(f"reading the environment of {listed(names)}")
    states, errors = on_all(names, lambda name: look(fleet.agent(name), {}), stop=fleet.give_up_all)
    by_hand = {name: _left_alone(state) for name, state in states.items() if setup_plan.is_somebodys(state)}
    states = {name: state for name, state in states.items() if name not in by_hand}
    python = fleet_python(states) if states else ""
    platforms, refused = on_all(states, lambda name: _usable(fleet, name, states[name], python))
    errors |= refused
    locks = {}
    for platform in dict.fromkeys(platforms.values()):
        say(f"resolving the packages for {platform.name}")
        locks[platform] = wheelhouse.lock(wanted, platform, anew=how.upgrade)
    todo = {name: setup_plan.difference(states[name], locks[platform], platform.python) for name, platform in platforms.items()}
    supplies = {}
    if not how.check:
        for platform in dict.fromkeys(platforms[name] for name, found in todo.items() if not found.is_whole):
            lacks_python = any(platforms[name] == platform and platform.python not in states[name].pythons for name in platforms)
            supplies[platform] = Supply(locks[platform], platform, say, with_python=lacks_python, fetches_here=how.fetches_here)
    progress = TransferProgress(say)

    def one(name: str) -> NodeDone:
        platform, found = platforms[name], todo[name]
        lock = locks[platform]
        brought = (
            0 if how.check or found.is_whole else _bring(fleet.agent(name), states[name], platform, lock, supplies[platform], progress)
        )
        return NodeDone(
            difference=found.text, is_whole=found.is_whole, changed=not how.check and not found.is_whole, python=platform.python,
            packages=len(lock.packages), sent_bytes=brought,
        )  # fmt: skip

    firsts = [next(name for name in platforms if platforms[name] == platform) for platform in supplies] if how.between_nodes else []
    try:
        done, failed = on_all(firsts, one, stop=fleet.give_up_all)
        with ExitStack() as shares:
            for name in firsts:
                if name in done:
                    shares.enter_context(supplies[platforms[name]].shared_by(fleet.agent(name)))
            others, not_brought = on_all([name for name in platforms if name not in firsts], one, stop=fleet.give_up_all)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_left_behind(sorted(progress.installing))) from None
    done |= others | by_hand
    return {name: done[name] for name in names if name in done}, errors | failed | not_brought


def _left_behind(installing: list[str]) -> Hint:
    if not installing:
        return Hint("Files that have arrived stay on the nodes. To continue: {}", homelab("setup"))
    return Hint(
        "{} finishes the installation that has begun. To continue after it: {}; to remove it: {}",
        listed(installing),
        homelab("setup"),
        homelab("teardown"),
    )


def look(agent: Agent, wanted_files: Mapping[str, str]) -> SetupState:
    """What of an environment is on a node; the files named (place -> sha256) are read there. Raises HomelabError."""
    node = agent.node
    environment = environment_of(node)
    if environment is None:
        raise HomelabError(
            f"setup makes environments, but {node.python} is not in one", where=f"cluster.toml, node {node.name}: python",
            hint=Hint("edit cluster.toml, node {}: python = \"~/.homelab/env/bin/python\"; then: {}", node.name, homelab("setup", node.name)),
        )  # fmt: skip
    request = LookRequest(environment=environment, files=dict(wanted_files))
    return read(SetupState, agent.ask("setup-look", request, timeout_s=_LOOK_TIMEOUT_S))


def refuse_while_runs_live(agent: Agent) -> None:
    """Raises HomelabError where a run uses the environment, or is about to: the node refuses it, too, but only after gigabytes were sent."""
    users = [run["name"] for run in agent.ask("runs")["runs"] if run["alive"] or run["busy"]]
    if users:
        raise HomelabError(
            f"run {listed(users)} uses the environment of this node now",
            where=f"node {agent.node.name}",
            hint=Hint("{}, or wait until it ends", homelab("stop", users[0])),
        )


def when_free(ask: Callable[[], T], say_waiting: Callable[[], object]) -> T:
    """The answer, once the setup of a command that was killed has ended on this node. Raises BusyError after `_BUSY_LIMIT_S`, HomelabError."""
    until_s = time.monotonic() + _BUSY_LIMIT_S
    while True:
        try:
            return ask()
        except BusyError:
            if time.monotonic() > until_s:
                raise
        say_waiting()
        time.sleep(_BUSY_AGAIN_S)


def _left_alone(state: SetupState) -> NodeDone:
    words = "you made this environment, so setup changes nothing in it; preflight tests it"
    return NodeDone(
        difference=words, is_whole=True, changed=False, python=state.environment_python, packages=len(state.packages), is_somebodys=True
    )


def _usable(fleet: Fleet, name: str, state: SetupState, python: str) -> Platform:
    setup_plan.check_environment(name, environment_of(fleet.cluster.node(name)) or "", state)
    return platform_of(name, state, python)


def _bring(agent: Agent, state: SetupState, platform: Platform, lock: Lock, supply: Supply, progress: TransferProgress) -> int:
    """Have the node get what it lacks, and install it; how many bytes it got."""
    name = agent.node.name
    refuse_while_runs_live(agent)
    python = state.pythons.get(platform.python, "")
    needed = [part for part in supply.parts if not (python and part.name == python_archive.NAME)]
    state = look(agent, {part.name: part.sha256 for part in needed})
    steps = setup_plan.plan(state, needed)
    setup_plan.check_room(name, state, steps)
    progress.begin(name, steps.send_bytes)
    refused: set[str] = set()
    for part in steps.parts:
        supply.bring(agent, part, state.partial.get(part.name, 0), lambda count: progress.add(name, count), refused)
    request = MakeRequest(
        environment=environment_of(agent.node) or "", python=python, version=platform.python, lock=lock.digest, is_closed=lock.is_closed
    )
    progress.end(name, f"installing {len(lock.packages)} packages")
    progress.installing.add(name)
    made = when_free(
        lambda: agent.ask("setup-make", request, timeout_s=_MAKE_TIMEOUT_S),
        lambda: progress.end(name, "waiting for another setup that is working on this node"),
    )
    progress.installing.discard(name)
    if made["packages"] != lock.versions:
        raise HomelabError(
            "the environment lacks packages that were installed", where=f"node {name}",
            hint=Hint("{}; if that fails again: {}", homelab("setup", name), homelab("teardown", name)),
        )  # fmt: skip
    return steps.send_bytes
