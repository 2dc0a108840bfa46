"""The whole of `homelab verify`: the record is read and its chain followed, then windows are computed again, one after the other, and judged."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.base.units import listed
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.features.verify import record_source, window_run
from homelab.controller.features.verify.step_record import RecordFault, StepRecord, Window
from homelab.controller.features.verify.verification import Verification, notes_of
from homelab.controller.features.verify.window_run import WindowRequest
from homelab.controller.features.verify.window_verdict import Verdict, WindowResult, answer, judged
from homelab.controller.planning.advice import reproducibility
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths

_MOST_NAMED = 12


@dataclass(frozen=True)
class VerifyRequest:
    """What the person asked for. `steps`: "A..B" by hand, "" where the chain chooses `count` windows; `names`: the nodes that compute, empty for those of
    the run; `skip`: checks that do not count.
    """

    cluster_file: Path
    steps: str
    count: int
    names: Sequence[str]
    strategy: str | None
    skip: Collection[str]


def verify(fleet: Fleet, paths: RunPaths, request: VerifyRequest, say: Say) -> Verification:
    """Raises HomelabError where there is no record with a chain, or where the first window cannot be computed; InputError for other steps than kept ones."""
    source = record_source.read(fleet, paths, say)
    record, plan = source.record, run_folder.plan_of(paths)
    if not record.end:
        raise HomelabError(
            "the record of this run has no chain: an older homelab has begun it", where=paths.name,
            hint=Hint("nothing of it can be verified; a run that is launched now has one: {}", homelab("launch RECIPE")),
        )  # fmt: skip
    faults = record.faults(source.card_end, least_steps=source.least_steps)
    start = record.start
    described_hash = run_folder.description_of(paths).run_json.get("recipe_hash")
    if not faults and (start is None or start.recipe_hash != described_hash):
        faults = [RecordFault(step=0, text="the record begins with another recipe, or other data, than run.json names")]
    windows = record.windows()
    wanted = [_by_hand(record, request.steps)] if request.steps else record.chosen(request.count)
    results: list[WindowResult] = []
    for window in wanted if not faults else ():
        try:
            results.append(_one(fleet, paths, request, record, window, say))
        except HomelabError as error:
            if not results:
                raise
            results.append(WindowResult(window=window, verdict="not computed", because=error.message.splitlines()[0]))
    precision = (start.precision if start else "") or plan.precision
    said = answer(paths.name, [fault.text for fault in faults], results, precision)
    verdicts = {result.verdict for result in results}
    verdict: Verdict = (
        "differs"
        if faults or "differs" in verdicts
        else "unclear"
        if "unclear" in verdicts
        else "agrees"
        if verdicts == {"agrees"}
        else "not computed"
    )
    return Verification(
        run=paths.name, answer=said, verdict=verdict, precision=precision, last_step=record.last_step, chain=record.end, card_end=source.card_end,
        node=source.node, faults=tuple(faults), windows=tuple(results), window_count=len(windows), by_hand=bool(request.steps),
        notes=tuple(notes_of(record, source.card_end, results, len(windows), by_hand=bool(request.steps))),
    )  # fmt: skip


def _by_hand(record: StepRecord, steps: str) -> Window:
    """The window that a person names. Raises InputError where its ends are not kept checkpoints."""
    kept = [0, *sorted(step for step in record.kept if step > 0)]
    first, _, last = steps.partition("..")
    named = ", ".join(map(str, kept if len(kept) <= _MOST_NAMED else [*kept[: _MOST_NAMED - 1], "...", kept[-1]]))
    if not (first.isdecimal() and last.isdecimal() and len(steps) < 30) or int(first) >= int(last):
        raise InputError(
            "these are no steps",
            where=f"--steps {steps}",
            hint=f"two of the kept steps ({named}), the earlier one first: --steps {kept[0]}..{kept[-1]}",
        )
    for step in (int(first), int(last)):
        if step not in kept:
            raise InputError(
                f"the checkpoint of step {step} was not kept", where=f"--steps {steps}",
                hint=f"name two of {named}" if len(kept) > 1 else "[checkpoint] keep_every in the recipe keeps checkpoints of the next run",
            )  # fmt: skip
    return Window(begin=int(first), end=int(last))


def _one(fleet: Fleet, paths: RunPaths, request: VerifyRequest, record: StepRecord, window: Window, say: Say) -> WindowResult:
    """Where the nodes have its checkpoints, the window is computed again; where they have others than the record names, nothing need be."""
    points, described = [], run_folder.description_of(paths)
    for step in (window.begin, window.end):
        if step == 0:
            continue
        found = record_source.kept(fleet, paths, step, record.kept[step])
        if found.point.holders:
            points.append(found.point)
        elif found.others and not found.silent:
            because = f"the checkpoint of step {step} on {listed(found.others)} is another one than the record names"
            return WindowResult(window=window, verdict="differs", because=because)
        else:
            because = f"no node that answers has the checkpoint of step {step}: turn on the nodes of the run, or name other steps (--steps)"
            return WindowResult(window=window, verdict="not computed", because=because)
    say(f"steps {window}")
    in_cluster = {node.name for node in fleet.cluster.nodes}
    names = list(request.names) or [node.name for node in run_folder.plan_of(paths).nodes if node.name in in_cluster]
    order = WindowRequest(fleet, paths, request.cluster_file, names, request.strategy, request.skip, say)
    again, compared, machines = window_run.run_window(order, record, window, points)
    recipe, model = described.recipe, described.run_json.get("model")
    config = model.get("config") if isinstance(model, dict) else None
    limit = reproducibility.limit_of(recipe, config if isinstance(config, dict) else {}) if isinstance(recipe, TrainRecipe) else None
    return judged(record, window, again, compared, machines, limit)
