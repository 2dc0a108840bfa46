"""One card of one node, measured: a short job of one rank that trains a model of random weights (`homelab.worker.tools.card_speed`), and its row."""

from __future__ import annotations

import contextlib
import queue
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

import homelab as package
from homelab.controller.attempt import planner, short_job
from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.node_words import advice
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.base.say import Say
from homelab.controller.config.file_faults import faults_of
from homelab.controller.config.recipe import parse_recipe
from homelab.controller.facts import card_generation
from homelab.controller.facts.node import Facts
from homelab.controller.facts.reading import read
from homelab.controller.features.bench import card_recipe
from homelab.controller.features.bench.card_recipe import CardRecipe, Kind
from homelab.controller.features.preflight import gather
from homelab.controller.planning.machines import cards
from homelab.controller.planning.speed import measured_cards
from homelab.controller.planning.speed.measured_cards import MeasuredCard, Table
from homelab.controller.planning.speed.speed_profiles import cpu_name
from homelab.controller.planning.types import Plan
from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.fanout import Fleet
from homelab.controller.remote.session import Stream
from homelab.controller.run import signals
from homelab.shared.protocol.card_messages import GpuFacts
from homelab.shared.protocol.collective_messages import CollectiveLine, CollectiveRank
from homelab.shared.protocol.collective_stages import DONE
from homelab.shared.protocol.errors import parts_of
from homelab.shared.protocol.network_messages import FreePortRequest

PROGRAM = ("-m", "homelab.worker.tools.card_speed")
SOURCE = "homelab bench card"
PORT = 29_500
SILENT_S = 20.0  # the agent says something every second
LIMIT_S = 330.0
_LAST_WORDS_S = 5.0


@dataclass(frozen=True)
class MeasuredCardSpeed:
    """The row, and how many times as fast the card is as its data sheet lets expect; None where no data sheet says anything."""

    row: MeasuredCard
    of_guess: float | None


def measure(fleet: Fleet, kind: Kind, index: int | None, say: Say) -> MeasuredCardSpeed:
    """Measure a card of the one node of the fleet: the one with nvidia-smi's number `index`, by default the first that trains; without any, its CPU.

    Raises InputError for a card that is not there, HomelabError where it is in use or what is measured does not run, UnreachableError.
    """
    seen = gather.facts(fleet, recipe=None, material=[], port=PORT, say=say)
    (node,) = fleet.cluster.nodes
    for error in seen.unreachable.values():
        raise error
    facts = seen.facts[node.name]
    card_recipe.refuse_unready(node.name, facts, kind)
    card = card_recipe.card_of(node.name, facts, index)
    recipe = card_recipe.recipe_of(node.name, facts, card, kind)
    row = _asked(facts, card, recipe, kind)
    result = _run(fleet, _plan(fleet, facts, card), recipe.request(row, "cuda" if card else "cpu"), say)
    return _judged({**row, **result}, card is not None, node.name)


def _asked(facts: Facts, card: GpuFacts | None, recipe: CardRecipe, kind: Kind) -> dict[str, Any]:
    """The row without what is measured. Nothing in it names a machine or a person."""
    about: dict[str, Any] = {"homelab": package.__version__, "source": SOURCE, "card": cpu_name(facts)}
    if card is None:
        return recipe.row(kind=kind, precision="fp32", **about)
    told = {
        "card": card.name, "memory_bytes": card.memory_total_bytes, "driver": facts.gpu.driver_version, "power_limit_w": card.power_limit_w,
        "power_limit_default_w": card.power_limit_default_w,
    }  # fmt: skip
    precision = "bf16" if card_generation.has_bf16(card_generation.of_card(card, facts.gpu)) else "fp16"
    return recipe.row(kind=kind, precision=precision, **{**about, **{key: value for key, value in told.items() if value is not None}})


def _plan(fleet: Fleet, facts: Facts, card: GpuFacts | None) -> Plan:
    """A launch's environment and command for one rank on this card."""
    gpu = (
        facts.gpu
        if card is None
        else facts.gpu.model_copy(update={"cards": (card,), "left_out": tuple(one for one in cards.everything(facts) if one != card)})
    )
    node = fleet.cluster.nodes[0].model_copy(update={"gpus": ()})
    cluster = fleet.cluster.model_copy(update={"nodes": (node,)})
    inputs = planner.inputs_of(
        cluster, {node.name: facts.model_copy(update={"gpu": gpu})}, parse_recipe({"script": {"path": "card.py"}}), [], "card"
    )
    return planner.planned(replace(inputs, measured_cards=Table()))


def _run(fleet: Fleet, plan: Plan, question: dict[str, Any], say: Say) -> dict[str, Any]:
    """The results of the rank. Ctrl-C ends it on the node."""
    name, job = plan.nodes[0].name, f"card-{secrets.token_hex(4)}"
    port = fleet.ask("free-port", FreePortRequest(low=plan.master_port + 1), names=[name])
    for error in port[1].values():
        raise error
    plan = plan.model_copy(update={"master_port": int(port[0][name]["port"])})
    body = short_job.request(plan, name, job, PROGRAM)
    environment = {key: value for key, value in body.environment.items() if key not in ("HOMELAB_RUN_DIR", "HOMELAB_ATTEMPT")} | {
        "HF_HUB_OFFLINE": "1"
    }
    streams: dict[str, Stream] = {}
    clean = False
    try:
        with signals.held():
            request = body.replace(environment=environment, limit_s=LIMIT_S, input=question)
            streams = {name: fleet.agent(name).open("collective", request)}
        with short_job.listening(streams) as lines:
            last = _until_done(name, lines, say)
        clean = last.ended is not None and not last.ended.left
        return _results(last)
    finally:
        with signals.held():
            for stream in streams.values():
                stream.close()
            if not clean:
                short_job.end(fleet, job, [name], set())


def _until_done(node: str, lines: queue.Queue[short_job.NodeLine], say: Say) -> CollectiveLine:
    """The line in which the rank is done, or the last one behind it. Raises HomelabError with the rank's words, UnreachableError where the node is silent."""
    began_s = heard_s = time.monotonic()
    said, done, done_s = "", None, 0.0
    while True:
        now_s = time.monotonic()
        if done is not None and (done.ended is not None or now_s - done_s > _LAST_WORDS_S):
            return done
        if now_s - heard_s > SILENT_S or now_s - began_s > LIMIT_S + SILENT_S:
            why = f"this node did not answer for {now_s - heard_s:.0f} s while its card was measured"
            raise UnreachableError(why, where=f"node {node}", hint=homelab("preflight --nodes", node))
        with contextlib.suppress(queue.Empty):
            _, text = lines.get(timeout=0.1)
            heard_s = time.monotonic()
            line = _line(node, text)
            rank = next(iter(line.ranks.values()), None)
            if rank is not None and rank.stage == DONE:
                done, done_s = line, done_s or heard_s
            elif line.ended is not None or (rank is not None and rank.error):
                raise _failure(node, line, rank)
            progress = _progress(line, rank)
            if progress != said:
                say(progress)
                said = progress


def _line(node: str, text: bytes | None) -> CollectiveLine:
    if text is None:
        raise UnreachableError(
            "the connection to this node broke while its card was measured", where=f"node {node}", hint=homelab("preflight --nodes", node)
        )
    try:
        answer = decoded(text)
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            raise HomelabError(str(answer["error"].get("message")), where=f"node {node}", hint=homelab("preflight --nodes", node))
        return read(CollectiveLine, answer)
    except (ValueError, ValidationError):
        raise HomelabError(
            "it answered with something that homelab's agent never sends", where=f"node {node}", hint=homelab("preflight --nodes", node)
        ) from None


def _failure(node: str, line: CollectiveLine, rank: CollectiveRank | None) -> HomelabError:
    """The rank's own three parts, else its last words."""
    parts = parts_of(rank.error) if rank is not None and rank.error else None
    if parts:
        where = plain_lines(parts.get("where", ""))
        return HomelabError(
            parts["message"],
            where=f"node {node}{', ' if where else ''}{where}",
            hint=advice(node, parts.get("hint")) or homelab("preflight --nodes", node),
        )
    ended = line.ended
    words = [
        text.strip()
        for text in ((rank.error if rank else None) or "", *(ended.errors if ended else ()), *(ended.log if ended else ()))
        if text and text.strip()
    ]
    why = words[0 if rank and rank.error else -1][:500] if words else "the program ended and printed nothing"
    return HomelabError(f"the card could not be measured: {why}", where=f"node {node}", hint=homelab("preflight --nodes", node))


def _progress(line: CollectiveLine, rank: CollectiveRank | None) -> str:
    if rank is None:
        return plain_lines(line.phase)
    result: dict[str, Any] = rank.results[-1] if rank.results else {}
    step, rate = result.get("step"), result.get("tokens_per_s")
    figures = f", step {step}" if isinstance(step, int) else ""
    return plain_lines(rank.stage) + figures + (f", {rate:.0f} tokens/s" if isinstance(rate, int | float) else "")


def _results(line: CollectiveLine) -> dict[str, Any]:
    rank = next(iter(line.ranks.values()))
    result: dict[str, Any] = rank.results[-1] if rank.results else {}
    rate = result.get("tokens_per_s")
    return {key: result.get(key) for key in ("peak_bytes", "torch")} | {
        "tokens_per_s": round(rate, 1) if isinstance(rate, float) and 1 < rate < 1e9 else rate
    }


def _judged(row: dict[str, Any], has_card: bool, node: str) -> MeasuredCardSpeed:
    """The row, typed and bounded: what a node says is material. Raises HomelabError for what no card can have done."""
    hint = Hint("measure again; if the result is the same, the card or its driver reports wrong values: {}", homelab("doctor", node))
    try:
        found = MeasuredCard.model_validate(row)
    except ValidationError as error:
        (location, message), *_ = faults_of(error, MeasuredCard)
        raise HomelabError(
            f"the node's answer is not a measurement: {message}", where=f"node {node}, {'.'.join(map(str, location))}", hint=hint
        ) from error
    if not has_card:
        return MeasuredCardSpeed(found, None)
    fault = measured_cards.fault(found)
    if fault is not None and fault[0] != "card":
        raise HomelabError(f"the measurement is impossible: {fault[1]}", where=f"node {node}, {fault[0]}", hint=hint)
    return MeasuredCardSpeed(found, None if fault else measured_cards.of_guess(found))
