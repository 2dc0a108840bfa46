"""The sequence of `homelab setup`: look, resolve, fetch, send, make. What is to be done is decided in `homelab.provision`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from homelab.control.setup import cache, send, uv_program, wheelhouse
from homelab.control.setup.wanted import Wanted
from homelab.errors import HomelabError
from homelab.models import DisplayValue
from homelab.node_commands import environment_of
from homelab.protocol import files
from homelab.protocol.digest import file_sha256
from homelab.provision import setup_plan
from homelab.provision.node_state import NodeState
from homelab.provision.platform import Platform, common_python, platform_of
from homelab.provision.requirements import Lock
from homelab.provision.setup_plan import Part
from homelab.remote.fanout import Fleet, Outcome, on_all
from homelab.text.hint import Hint, homelab
from homelab.text.say import Say
from homelab.text.units import decimal_size, listed

_LOOK_TIMEOUT_S = 300.0  # some gigabytes are read to their ends
_MAKE_TIMEOUT_S = 3600.0


class NodeDone(DisplayValue):
    """What setup has found and done on a node. `difference`: in words; `sent_bytes` 0 with --check."""

    difference: str
    is_whole: bool
    changed: bool
    python: str
    packages: int
    sent_bytes: int = 0


def run(fleet: Fleet, names: Iterable[str], wanted: Wanted, *, check: bool, say: Say) -> Outcome[NodeDone]:
    """Bring these nodes to what is wanted, or with `check` only compare. One node's error does not stop the others."""
    names = list(names)
    say(f"looking at the environment of {listed(names)}")
    states, errors = on_all(names, lambda name: look(fleet, name, {}))
    python = common_python(states)
    platforms, refused = on_all(states, lambda name: _usable(fleet, name, states[name], python))
    errors |= refused
    locks = {}
    for platform in dict.fromkeys(platforms.values()):
        say(f"resolving the packages for {platform.name}")
        locks[platform] = wheelhouse.lock(wanted.lines, wanted.index, platform)
    todo = {name: setup_plan.difference(states[name], locks[platform], platform.python) for name, platform in platforms.items()}
    sources = {}
    if not check:
        for platform in dict.fromkeys(platforms[name] for name, found in todo.items() if not found.is_whole):
            say(f"fetching the packages for {platform.name}")
            sources[platform] = _sources(locks[platform], wanted.index, platform)

    def one(name: str) -> NodeDone:
        platform, found = platforms[name], todo[name]
        lock = locks[platform]
        sent = 0 if check or found.is_whole else _bring(fleet, name, states[name], platform, lock, sources[platform], say)
        return NodeDone(
            difference=found.text, is_whole=found.is_whole, changed=not check and not found.is_whole, python=platform.python,
            packages=len(lock.packages), sent_bytes=sent,
        )  # fmt: skip

    done, failed = on_all(platforms, one)
    return done, errors | failed


def look(fleet: Fleet, name: str, wanted_files: Mapping[str, str]) -> NodeState:
    """What of an environment is on a node; the files named (place -> sha256) are read there. Raises HomelabError."""
    node = fleet.cluster.node(name)
    environment = environment_of(node)
    if environment is None:
        raise HomelabError(
            f"setup makes environments, and {node.python} is in none", where=f"cluster.toml, node {name}: python",
            hint=Hint("edit cluster.toml, node {}: python = \"~/.homelab/env/bin/python\"; then: {}", name, homelab("setup", name)),
        )  # fmt: skip
    request = {"environment": environment, "files": dict(wanted_files)}
    return NodeState.model_validate(fleet.agent(name).ask("setup-look", request, timeout_s=_LOOK_TIMEOUT_S))


def refuse_while_runs_live(fleet: Fleet, name: str) -> None:
    """Raises HomelabError where a run uses the environment now."""
    alive = [run["name"] for run in fleet.agent(name).ask("runs")["runs"] if run["alive"]]
    if alive:
        raise HomelabError(
            f"run {listed(alive)} uses the environment of this node now", where=f"node {name}", hint=Hint("{}, or wait for its end", homelab("stop", alive[0]))
        )


def _usable(fleet: Fleet, name: str, state: NodeState, python: str | None) -> Platform:
    setup_plan.check_environment(name, environment_of(fleet.cluster.node(name)) or "", state)
    return platform_of(name, state, python)


def _sources(lock: Lock, index: str | None, platform: Platform) -> dict[Part, Path]:
    """The files that a node of this platform needs, and where they are here."""
    wheelhouse.fetch(lock, index, platform)
    text = cache.folder() / "requirements" / f"{lock.digest}.txt"
    files.write_atomic(text, lock.text.encode())
    uv = uv_program.fetch(platform.machine)
    wheels = {part: cache.folder() / part.name for part in wheelhouse.parts(lock)}
    return {_part("uv.whl", uv): uv, **wheels, _part("requirements.txt", text): text}


def _part(name: str, path: Path) -> Part:
    return Part(name=name, sha256=file_sha256(path), size_bytes=path.stat().st_size)


def _bring(fleet: Fleet, name: str, state: NodeState, platform: Platform, lock: Lock, sources: Mapping[Part, Path], say: Say) -> int:
    """Send what the node lacks and install it; how many bytes were sent."""
    agent = fleet.agent(name)
    refuse_while_runs_live(fleet, name)
    state = look(fleet, name, {part.name: part.sha256 for part in sources})
    steps = setup_plan.plan(state, list(sources))
    setup_plan.check_room(name, state, steps)
    for number, part in enumerate(steps.parts, 1):
        say(f"{name}: sending {part.name.rpartition('/')[2]} ({decimal_size(part.size_bytes)}, file {number} of {len(steps.parts)})")
        send.file(agent, part, sources[part], state.partial.get(part.name, 0))
    say(f"{name}: installing {len(lock.packages)} packages")
    request = {"environment": environment_of(agent.node), "python": state.pythons[platform.python], "version": platform.python, "lock": lock.digest}
    made = agent.ask("setup-make", request, timeout_s=_MAKE_TIMEOUT_S)
    if made["packages"] != lock.versions:
        raise HomelabError(
            "the environment does not hold what was installed", where=f"node {name}",
            hint=Hint("{}; if it says the same again: {}", homelab("setup", name), homelab("teardown", name)),
        )  # fmt: skip
    return steps.send_bytes
