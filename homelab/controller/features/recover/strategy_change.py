"""Another strategy for the next attempt of a run, named by hand: who computes what, and the curve stays. The plan carries it, run.json is as it was."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from homelab.controller.attempt import inputs, planner
from homelab.controller.base.errors import HomelabError, InputError, did_you_mean
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.checks import registry
from homelab.controller.features.preflight import gather
from homelab.controller.planning import verdict
from homelab.controller.planning.memory import freed
from homelab.controller.planning.memory.scenario import DoesNotFit
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log, run_folder, store
from homelab.controller.run.events import note
from homelab.controller.run.fingerprint import as_begun
from homelab.controller.run.paths import RunPaths
from homelab.shared.recipe.parallel import STRATEGY_NAMES

_NO_ROOM = Hint(
    "no other strategy has room: end other programs that use memory there ({}), or add a machine to cluster.toml",
    homelab("preflight --only memory --only gpu"),
)


def refuse_unknown(strategy: str | None, run: str | None, command: str = "recover") -> None:
    """Raises InputError for a name that a recipe could not have. `command`: of ours, that takes --strategy."""
    if strategy is not None and strategy not in STRATEGY_NAMES:
        raise InputError(
            f'no strategy is called "{strategy}".{did_you_mean(strategy, STRATEGY_NAMES)}', where=f"--strategy; allowed: {', '.join(STRATEGY_NAMES)}",
            hint=homelab(command, *([run] if run else []), "--strategy", "auto"),
        )  # fmt: skip


def refuse_impossible(fleet: Fleet, paths: RunPaths, strategy: str, skip: Collection[str], say: Say) -> None:
    """Raises InputError where no plan with this strategy can be made on these nodes, or no room is for it; nothing has been stopped yet.

    What is left of the last attempt counts as gone: it is ended before the next one starts.
    """
    described, last = run_folder.description_of(paths), run_folder.plan_of(paths)
    if not fleet.cluster.nodes:
        return  # who goes on is refused in words of its own
    items = inputs.of_run(paths, described.run_json)
    evidence = gather.facts(fleet, recipe=as_begun(described.recipe, last, strategy), material=items, port=0, say=say)
    evidence = replace(evidence, facts={name: freed.without_run(facts, paths.name) for name, facts in evidence.facts.items()})
    ill = {finding.node for finding in registry.judge_all(evidence, skip=skip) if finding.keeps_out}
    well = {name: facts for name, facts in evidence.facts.items() if name not in ill}
    if not well:
        return
    of_well = replace(evidence, cluster=evidence.cluster.only(tuple(well)), facts=well)

    def fault(name: str) -> HomelabError | None:
        recipe = as_begun(described.recipe, last, name)
        moment = run_folder.moment_of(described.run_json)
        try:
            plan = planner.planned(
                planner.inputs_from(of_well, recipe, items, paths.name, attempt=last.attempt + 1, port=last.master_port, moment=moment)
            )
        except HomelabError as error:
            return error
        short = verdict.lack_of_memory(plan)
        return None if short is None or "fit.memory" in skip else HomelabError(short.seen, where=paths.name, hint=short.edit)

    error = fault(strategy)
    if error is None:
        return
    others = [name for name in STRATEGY_NAMES if name != strategy and fault(name) is None]
    if not others and not isinstance(error, DoesNotFit):
        raise error
    hint = (
        Hint("those that can: {}; so: {}", ", ".join(others), homelab("recover", paths.name, "--strategy", others[0]))
        if others
        else _NO_ROOM
    )
    raise InputError(
        f"the run cannot continue with this strategy: {error.message}",
        where=f"{paths.name}: --strategy {strategy}; nothing was stopped",
        hint=hint,
    )


def named(plan: Plan, strategy: str | None) -> Plan:
    """The plan with the name, where a person gave one."""
    return plan if strategy is None else plan.model_copy(update={"strategy_by_hand": strategy})


def keep(paths: RunPaths, last: Plan, plan: Plan, strategy: str | None) -> None:
    """The attempt has started: later ones keep the strategy that was named for it."""
    if strategy is None:
        return
    with store.best_effort_write(paths.plan_json(plan.attempt)):
        store.write_json(paths.plan_json(plan.attempt), plan.model_dump(mode="json"))
    event_log.append(paths, note(sentence(last, plan)))


def sentence(last: Plan, plan: Plan) -> str:
    """What became of the strategy."""
    change = f"{last.strategy} -> {plan.strategy}" if last.strategy != plan.strategy else f"{plan.strategy} as before"
    asked = f" ({plan.strategy_by_hand})" if plan.strategy_by_hand not in (None, plan.strategy) else ""
    return f"strategy {change}, by hand{asked}"
