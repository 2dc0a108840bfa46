"""What the report of a run is made of, gathered from its folder; nodes that hold newer metrics are asked for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from homelab.controller.attempt import diagnosis_store
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import homelab
from homelab.controller.config.cluster import Cluster
from homelab.controller.facts.reading import read
from homelab.controller.features.profile.rank_profile import RankProfile
from homelab.controller.features.report.energy_price import Place
from homelab.controller.features.report.report_builder import Asked, RunAbout, Sources
from homelab.controller.features.track.metrics_source import MetricsSource
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log, run_folder, run_record, store
from homelab.controller.run.metrics import lines_of
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import profile_files
from homelab.shared.protocol.rank_messages import Metric
from homelab.shared.protocol.request import RunRequest
from homelab.shared.protocol.run_messages import CardJoules, Energies


def gather(fleet: Fleet, paths: RunPaths, cluster: Cluster) -> Sources:
    """Whatever can be had; what cannot is named in `missing`. Raises HomelabError where the run's folder is damaged."""
    missing = []
    try:
        look = MetricsSource(fleet, paths).ask()
        state = look.state
        if look.trouble:
            missing.append(f"newer metrics may be on the nodes: {look.trouble}")
    except HomelabError as error:
        state = run_folder.state_of(paths)
        missing.append(f"newer metrics may be on the nodes: {error.message}")
    return recorded(paths, cluster, lines_of(paths), fleet=fleet, state=state, missing=missing)


def recorded(
    paths: RunPaths,
    cluster: Cluster,
    lines: Iterable[dict[str, Any]],
    *,
    fleet: Fleet | None = None,
    state: str = "",
    missing: Sequence[str] = (),
) -> Sources:
    """What is written down on this machine. `lines`: of the metrics; `fleet`: is asked for the energy of the cards."""
    run_json, gone = store.read_object(paths.run_json), list(missing)
    now = time.time()
    plans = {number: plan for number in run_folder.attempts(paths) if (plan := _plan(paths, number))}
    diagnoses = {number: stored.diagnosis for number in plans if (stored := diagnosis_store.read(paths, number))}
    return Sources(
        run=paths.name, state=state or run_folder.state_of(paths), now=now, about=RunAbout.model_validate(run_json), recipe=run_record.recipe_in(run_json),
        plans=plans, metrics=[metric for line in lines if (metric := _metric(line))], events=event_log.lines(paths), diagnoses=diagnoses,
        price=cluster.energy, asked=[asked for line in store.read_lines(paths.answers_jsonl) if (asked := _asked(line))], missing=gone,
        utc_offset_s=time.localtime(now).tm_gmtoff, energy=_energy(fleet, paths, plans), profiles=_profiles(paths, run_json, gone),
    )  # fmt: skip


def _profiles(paths: RunPaths, run_json: Mapping[str, object], missing: list[str]) -> list[RankProfile]:
    """Those that `homelab profile` has fetched; what is known of none is named in `missing`."""
    if profile_files.REQUEST not in run_json:
        return []
    found = []
    for file in sorted(paths.profiles.glob(f"rank-*/{profile_files.SUMMARY}")):
        try:
            found.append(RankProfile.model_validate(store.read_json(file)))
        except ValidationError:
            missing.append(f"a profile cannot be read: {file}")
    if not found:
        missing.append(
            f"steps of this run were profiled, but the profile is not here yet: {homelab('profile', paths.name)}, then make the report again"
        )
    return sorted(found, key=lambda profile: profile.rank)


def _energy(fleet: Fleet | None, paths: RunPaths, plans: Mapping[int, Plan]) -> dict[Place, Sequence[CardJoules]]:
    """What the nodes say now, and of those that do not answer what they said for an earlier report: it is kept in the run's folder."""
    said = store.read_object(paths.energy_json)
    if fleet is not None and any(plan.device == "cuda" for plan in plans.values()):
        answers, _ = fleet.ask("energies", RunRequest(run=paths.name))
        said.update({node: answer for node, answer in answers.items() if answer["attempts"]})
        if said:
            with store.best_effort_write(paths.energy_json):
                store.write_json(paths.energy_json, said)
    cards: dict[Place, Sequence[CardJoules]] = {}
    for node, entry in said.items():
        try:
            attempts = read(Energies, entry).attempts
        except ValidationError:
            continue
        cards.update({(int(number), node): measured for number, measured in attempts.items()})
    return cards


def _plan(paths: RunPaths, number: int) -> Plan | None:
    try:
        return run_folder.plan_of(paths, number)
    except HomelabError:
        return None


def _metric(line: dict[str, object]) -> Metric | None:
    try:
        return read(Metric, line)
    except ValidationError:
        return None


def _asked(line: dict[str, object]) -> Asked | None:
    try:
        return Asked.model_validate(line)
    except ValidationError:
        return None
