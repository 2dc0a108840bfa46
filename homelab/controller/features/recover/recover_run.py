"""The whole of a recovery by hand: examined, refused or halted, resumed, and left with its supervisor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from homelab.controller.attempt import remote_supervisor, run_owner
from homelab.controller.attempt.placement import SupervisorPlacement, Where
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.facts.node_commands import on_node
from homelab.controller.features.recover import examine, halt, resume, resume_guards, strategy_change
from homelab.controller.features.track import forwarder_start
from homelab.controller.features.track.forwarder_start import StartView
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import (
    adoption,
    claims,
    leave_folder,
    process_owner,
    run_folder,
    run_lookup,
    stopped_holder,
    store,
    supervisor_record,
)
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.restart import Restart, halvings


@dataclass(frozen=True)
class RecoverRequest:
    """What the person asked for. `name` of the run, None for the one that lives or the newest; `nodes`: that may go on with it.

    `skip`: checks that do not count; `strategy`: to go on with, None for the one of before. `age_s`: for how many seconds it has been
    asked for: a stop that came before counts no more.
    """

    name: str | None
    nodes: Sequence[str]
    cluster_file: Path
    runs_dir: Path
    skip: Collection[str]
    supervise: Where
    from_scratch: halt.Scratch = "never"
    strategy: str | None = None
    age_s: Callable[[], float] = process_owner.age_s


@dataclass(frozen=True)
class Recovered:
    """The new attempt, why there is one, and what the person should know beside it. `is_program`: of a program of one's own."""

    paths: RunPaths
    plan: Plan
    examination: examine.Examination
    notes: Sequence[Hint]
    is_program: bool = False
    strategy: str = ""
    """What became of the strategy, where the person named one."""


class RecoverView(StartView, Protocol):
    """How the person is told."""

    def examined(self, examination: examine.Examination, notes: Sequence[Hint]) -> None:
        """What happened, before anything is stopped."""
        ...

    def accepts(self, program: adoption.AdoptedProgram) -> bool:
        """Whether the nodes shall run what only they have said. Raises InputError where there is nobody to ask."""
        ...

    def resumed(self, resumed: Recovered) -> None:
        """The run trains again."""
        ...


def recover_run(fleet: Fleet, request: RecoverRequest, view: RecoverView) -> RunPaths:
    """Recover a run; `fleet` is the whole cluster. Raises HomelabError when it cannot be recovered, or need not."""
    with ExitStack() as exclusive, ExitStack() as progress:
        with view.progress() as say:
            paths = run_lookup.run(fleet, request.runs_dir, request.name, say)
            described = run_folder.description_of(paths)
            placement = SupervisorPlacement(request.supervise if described.recipe.recovery.auto else "no")
            exclusive.enter_context(supervisor_record.exclusive(paths, wants_supervisor=placement.is_wanted))
            _refuse_supervised(fleet, paths)
            again = (
                " --from-scratch" if request.from_scratch == "always" else ""
            )  # else it and the error that names it would lead in a circle
            leave_folder.refuse(fleet, request.runs_dir, request.nodes, f"recover {paths.name}{again}")
            names = [node.name for node in fleet.cluster.nodes]
            claim = exclusive.enter_context(claims.claimed(fleet, paths.name, names, "recovered by hand", age_s=request.age_s))
            examination = examine.examine(fleet, paths, say)
            if request.strategy is not None:
                well = fleet.only([name for name in request.nodes if name not in examination.unreachable])
                strategy_change.refuse_impossible(well, paths, request.strategy, request.skip, say)
        notes = resume_guards.changed_here(described.run_json)
        view.examined(examination, notes)
        program = adoption.to_ask(paths)
        if program is not None:
            if not view.accepts(program):
                hint = Hint("to read what it is: {}; to start your own: {}", homelab("status", paths.name), homelab("launch RECIPE"))
                raise HomelabError("nothing was started", where=paths.name, hint=hint)
            adoption.accept(paths)
        say = progress.enter_context(view.progress())
        run = claims.ClaimedRun(fleet, claim, paths, say)
        halted = halt.halt(run, examination, nodes=request.nodes, from_scratch=request.from_scratch)

        ends, by_hand = _ends(paths, examination)

        def leave(plan: Plan) -> None:
            supervisor_record.remember(paths, by_hand)
            # `exclusive` ends first: the supervisor holds the same lock, and claims the run when it fails.
            with forwarder_start.left_running(placement, fleet, paths, request.cluster_file, request.nodes, view), closing(exclusive):
                progress.close()  # on a terminal it would take what is printed now for its own
                said = strategy_change.sentence(last, plan) if request.strategy else ""
                view.resumed(Recovered(paths, plan, examination, notes, is_program=described.recipe.script is not None, strategy=said))

        last = run_folder.plan_of(paths)
        head = last.head if last.head in halted.names else halted.names[0]
        addresses = {node.name: node.lan_address for node in last.nodes}
        with placement.prepare(
            fleet, remote_supervisor.SupervisorRequest(paths.name, head, request.nodes, addresses, halted.unreachable), say
        ):
            wanted = resume.NextAttempt(request.nodes, request.skip, halvings=halvings(ends), strategy=request.strategy)
            resume.resume(run, examination, halted, wanted, announce=leave)
        return paths


def _ends(paths: RunPaths, examination: examine.Examination) -> tuple[list[Restart], list[Restart]]:
    """The restarts that the supervisors of this run have made, and the end that this recovery answers; the second alone, too."""
    diagnosis = examination.diagnosis
    here = [Restart(0.0, diagnosis.cause, diagnosis.first_node, -1)] if diagnosis else []
    before = supervisor_record.valid_history(store.read_object(paths.supervisor_json))["restarts"]
    return [*(Restart(**entry) for entry in before), *here], here


def _refuse_supervised(fleet: Fleet, paths: RunPaths) -> None:
    """Raises InputError when a supervisor is at work on a node or elsewhere (`supervisor_record` asks this machine): two would stop each other's attempts."""
    active = remote_supervisor.at_work(fleet, paths)
    if active is not None:
        name, reply = active
        kill = on_node(fleet.cluster.node(name), f"kill {'-KILL ' if reply.frozen else ''}{reply.pid or 'PID'}")
        stopped = stopped_holder.note(fleet.cluster, paths, {name: reply})
        if stopped is not None:
            hint = Hint("{}; to do it by hand: {}, then run the command again", stopped, kill)
            raise InputError("a supervisor that does nothing blocks this run", where=f"{paths.name}; {name}", hint=hint)
        raise InputError(
            f"this run has a supervisor that recovers it; now it is {reply.doing or 'at work'}: {reply.why}",
            where=f"{paths.name}, process {reply.pid or '?'} on {name}",
            hint=Hint("{}; to do it by hand: {}, then run the command again", homelab("status", paths.name), kill),
        )
    follower = run_owner.elsewhere(fleet, paths)
    if follower is not None:
        pid = follower.process.get("pid")
        raise InputError(
            f"this run has a supervisor on another machine, which recovers it; it was last heard {follower.silent_s:.0f} s ago",
            where=f"{paths.name}; {follower.by or 'its name is not known'}",
            hint=Hint(
                "{}; to do it by hand, on that machine: kill {}, then run the command here again",
                homelab("status", paths.name),
                pid if isinstance(pid, int) else "PID",
            ),
        )
