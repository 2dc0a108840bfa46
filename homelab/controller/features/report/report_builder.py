"""`build`: the Report of a run from what its folder holds. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import WrapValidator

from homelab.controller.base.models import WireModel
from homelab.controller.base.units import listed
from homelab.controller.config.cluster import EnergyPrice
from homelab.controller.config.recipe import Recipe
from homelab.controller.dashboard import words
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.features.profile import over_ranks
from homelab.controller.features.profile.rank_profile import RankProfile, predicted_bytes
from homelab.controller.features.report.comparison import compared, shares
from homelab.controller.features.report.curves import by_step, curves, device_of, devices, step_rows
from homelab.controller.features.report.energy_price import Place, energy
from homelab.controller.features.report.run_report import Answered, Energy, GivenBackRow, MachineRow, Profiled, RunReport
from homelab.controller.features.report.timeline import attempt_rows, timeline
from homelab.controller.planning.types import Plan
from homelab.controller.remote.poll_reply import LineOrEmpty, MomentOrNone, or_none
from homelab.controller.run import events, leave
from homelab.controller.run.metric_keys import KnownKeys
from homelab.controller.run.state import FINISHED
from homelab.controller.run.undone_lines import Undone
from homelab.shared.protocol.rank_messages import Metric
from homelab.shared.protocol.run_messages import CardJoules

_MOST_SAID = 4000  # characters of an answer


class DataAbout(WireModel):
    """A data file of run.json: what its content is."""

    sha256: LineOrEmpty = ""


class RunAbout(WireModel):
    """run.json, as far as it can be read; a person may have spoilt any of it."""

    homelab: LineOrEmpty = ""
    git_revision: LineOrEmpty = ""
    recipe_file: LineOrEmpty = ""
    recipe_hash: LineOrEmpty = ""
    created_at: MomentOrNone = None
    versions: Annotated[dict[str, dict[str, Any]] | None, WrapValidator(or_none)] = None
    data: Annotated[dict[str, DataAbout | None] | None, WrapValidator(or_none)] = None


class Asked(WireModel):
    """One line of answers.jsonl: a question, and what the model said, before its training (`base`) or after."""

    prompt: str
    base: bool = False
    answer: str


@dataclass(frozen=True)
class Sources:
    """What is known of a run. `metrics` are all lines that were gathered; `energy`: attempt and node -> its cards; `events` each have a time.

    `missing`: what could not be had, in words. `now` in seconds since 1970, `utc_offset_s` of the reader's clock then.
    """

    run: str
    state: str
    now: float
    about: RunAbout = field(default_factory=RunAbout)
    recipe: Recipe | None = None
    plans: Mapping[int, Plan] = field(default_factory=dict)
    metrics: Sequence[Metric] = ()
    events: Sequence[Mapping[str, Any]] = ()
    diagnoses: Mapping[int, Diagnosis] = field(default_factory=dict)
    energy: Mapping[Place, Sequence[CardJoules]] = field(default_factory=dict)
    price: EnergyPrice = field(default_factory=EnergyPrice)
    asked: Sequence[Asked] = ()
    missing: Sequence[str] = ()
    profiles: Sequence[RankProfile] = ()
    utc_offset_s: int = 0


def build(sources: Sources) -> RunReport:
    """The report. A step that a later attempt has done again counts once, as that one did it."""
    lines = counted(sources.metrics, {number: plan.resume_step for number, plan in sources.plans.items()})
    plan = sources.plans[max(sources.plans)] if sources.plans else None
    attempts = attempt_rows(sources.plans, sources.events, lines, sources.diagnoses, sources.state)
    happenings, left_out = timeline(sources.events, lines)
    started_at = next((row.started_at for row in attempts if row.started_at is not None), None)
    trained_at = max((line.time for line in lines if line.kind in ("train", "save", "eval")), default=None)
    # An attempt that was seen in trouble may train on: while it does, its newest line tells how far the run is.
    end = attempts[-1].ended_at if attempts and sources.state in {*FINISHED, "lost"} else None
    ended_at = trained_at if end is None else end
    used = energy_of(sources, lines)
    return RunReport(
        run=sources.run, state=sources.state, recipe_file=sources.about.recipe_file, made_at=sources.now, utc_offset_s=sources.utc_offset_s,
        created_at=sources.about.created_at, homelab=sources.about.homelab, facts=_facts(sources, plan), missing=(*_missing(sources, lines), *_unmeasured(used, plan)),
        curves=curves(lines, sources.plans), steps=step_rows(lines), step_count=len(by_step(lines)), attempts=attempts, timeline=happenings,
        timeline_left_out=left_out, shares=shares(sources.plans, lines), compared=compared(sources.plans, lines, started_at, ended_at),
        energy=used, answers=_answers(sources.asked), machines=_machines(sources, plan),
        profiled=_profiled(sources), given_back=_given_back(sources, ended_at),
    )  # fmt: skip


def energy_of(sources: Sources, lines: Sequence[Metric]) -> Energy:
    """What the cards of its ranks used. `lines`: those that count."""
    tokens: dict[tuple[int, int], int] = defaultdict(int)
    for line in lines:
        if line.kind == "train" and line.tokens is not None:
            tokens[line.attempt, line.rank] += line.tokens
    return energy(sources.plans, sources.energy, tokens, sources.price)


def _given_back(sources: Sources, ended_at: float | None) -> tuple[GivenBackRow, ...]:
    end = ended_at if ended_at is not None and sources.state in FINISHED else sources.now
    if sources.state == "stopped":  # an attempt that has failed may have waited for a node until then
        said = [(events.read(line), float(line["time"])) for line in sources.events]
        newest = max(sources.plans, default=None)
        end = next((time for event, time in said if event.ends_all and event.attempt == newest), end)
    spent = leave.times(sources.events, end)
    return tuple(GivenBackRow(node=node, count=its.count, seconds=its.seconds) for node, its in sorted(spent.items()))


def _profiled(sources: Sources) -> Profiled | None:
    ranks = sources.profiles
    if not ranks:
        return None
    predicted = {one.rank: predicted_bytes(sources.plans[one.attempt], one.rank) if one.attempt in sources.plans else None for one in ranks}
    return Profiled(
        steps=(ranks[0].steps[0], ranks[0].steps[-1]), ranks=tuple(one.rank for one in ranks), operators=over_ranks.dearest(ranks),
        exchanges=over_ranks.exchanges(ranks), memory=over_ranks.memory(ranks, predicted),
    )  # fmt: skip


def counted(lines: Sequence[Metric], resumed: Mapping[int, int]) -> list[Metric]:
    """The lines of the steps that count. `resumed`: attempt -> the step after which it went on."""

    def keyed(line: Metric) -> dict[str, Any]:
        return {"kind": line.kind, "attempt": line.attempt, "rank": line.rank, "step": line.step, "message": line.message}

    undone = Undone(resumed, KnownKeys(map(keyed, lines)))
    return [line for line in lines if keyed(line) not in undone]


def _missing(sources: Sources, lines: Sequence[Metric]) -> tuple[str, ...]:
    said = list(sources.missing)
    if not sources.plans:
        said.append("no plan of the run can be read: shares, machines and the plan's figures are unknown")
    trained = set(devices(sources.plans, [line for line in lines if line.kind == "train"]))
    if not trained:
        is_script = sources.recipe is not None and sources.recipe.model is None
        said.append(
            "the run is a [script]: its program reports no steps, no loss and no speed to homelab"
            if is_script
            else "no step was recorded, so there are no curves"
        )
    newest = max(sources.plans, default=0)
    silent = [str(rank.rank) for rank in sources.plans[newest].ranks if trained and device_of(rank) not in trained] if newest else []
    if silent:
        said.append(f"no step of rank {listed(silent)} is here: speeds and shares are those of the other ranks")
    return tuple(said)


def _unmeasured(used: Energy, plan: Plan | None) -> list[str]:
    """Why nothing is known of the energy of cards; processors have none that could be measured."""
    if plan is None or plan.device != "cuda" or used.kwh is not None:
        return []
    return [f"the energy of the cards: {'; '.join(dict.fromkeys(card.because for card in used.cards if card.because))}"]


def _facts(sources: Sources, plan: Plan | None) -> tuple[tuple[str, str], ...]:
    """What a reader wants to know first: the name of a figure and its value."""
    about, recipe = sources.about, sources.recipe
    facts: list[tuple[str, str]] = [("recipe", about.recipe_file), ("recipe hash", about.recipe_hash)]
    if recipe is not None and recipe.model is not None and recipe.train is not None:
        length = f"{recipe.train.epochs} epochs" if recipe.train.epochs is not None else f"{words.count(recipe.train.steps)} steps"
        facts += [("model", recipe.model.name), ("method", recipe.method.kind if recipe.method else ""), ("length", length)]
        facts += [
            ("global batch", f"{recipe.train.global_batch} samples"),
            ("learning rate", f"{recipe.train.learning_rate:g}"),
            ("seed", str(recipe.train.seed)),
        ]
    if plan is not None:
        facts += [
            ("strategy", plan.strategy),
            ("precision", plan.precision),
            ("device", f"{plan.world_size} x {plan.device}, {plan.backend}"),
        ]
    facts += [("homelab", about.homelab), ("revision", about.git_revision[:12])]
    return tuple((name, value) for name, value in facts if value)


def _machines(sources: Sources, plan: Plan | None) -> tuple[MachineRow, ...]:
    versions = sources.about.versions or {}
    devices: dict[str, list[str]] = {name: [] for name in versions}
    for rank in plan.ranks if plan else ():
        devices.setdefault(rank.node, []).append(rank.device_name)
    return tuple(
        MachineRow(
            node=node,
            devices=tuple(cards),
            versions=tuple(f"{name} {value}" for name, value in sorted(versions.get(node, {}).items()) if isinstance(value, str)),
        )
        for node, cards in devices.items()
    )


def _answers(asked: Sequence[Asked]) -> tuple[Answered, ...]:
    """Each question once, with the newest answer of each model."""
    rows: dict[str, dict[bool, str]] = {}
    for entry in asked:
        rows.setdefault(entry.prompt[:_MOST_SAID], {})[entry.base] = entry.answer[:_MOST_SAID]
    return tuple(Answered(question=question, before=said.get(True), after=said.get(False)) for question, said in rows.items())
