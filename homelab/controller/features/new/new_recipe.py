"""`homelab new`: look at the data, the machines and the model, decide, and write the recipe."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.controller.attempt import data_files, hub_config, inputs, planner
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.say import Say
from homelab.controller.config.cluster import Cluster, Gpu, Node
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.features.new import data_look, decisions, recipe_text
from homelab.controller.features.new.decisions import Base, Decision, Rows
from homelab.controller.features.preflight import data_sample, gather
from homelab.controller.planning import verdict
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.model import model_config
from homelab.controller.planning.speed.dataset_size import BYTES_PER_TOKEN
from homelab.controller.planning.types import Plan
from homelab.controller.planning.work.job import shape_of
from homelab.controller.remote.fanout import Fleet
from homelab.shared.protocol.worker_messages import FileSample, SampleResult

_PREVIEWS = 3
_FOUR_BITS_COST = 1.25  # a base in 4 bits has to be so much faster, because rounding it costs a little of the result
_LEAST_SEQ_LEN = 256
# The card that is decided for while nobody has said which machines there are.
_NO_CLUSTER = Cluster(nodes=(Node(name="one-card", host="localhost", gpus=(Gpu(model="RTX 4060", vram_gb=8.0),)),))
# Proposed where no model is named, the best first: each has a chat template, and is free to use.
PROPOSED = (
    "Qwen/Qwen3-32B", "Qwen/Qwen3-14B", "Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
)  # fmt: skip
_PROPOSED_HOURS = 12.0


@dataclass(frozen=True)
class Wish:
    """What a person asks for. `model` "" leaves it to homelab; `output` is the recipe's file."""

    data: str
    model: str
    output: Path
    offline: bool = False


@dataclass(frozen=True)
class Seen:
    """What was looked at. `sample` is None for data that lies on the nodes or the hub alone, and nobody could look."""

    sample: SampleResult | None
    items: tuple[RecipeInput, ...]
    inputs: PlanInputs
    notes: tuple[str, ...]

    @property
    def file(self) -> FileSample | None:
        """The training data."""
        return self.sample.files.get("train") if self.sample is not None else None

    def on(self, cluster: Cluster) -> Seen:
        """The same data for other machines, of which only cluster.toml is known."""
        return dataclasses.replace(self, inputs=dataclasses.replace(self.inputs, cluster=cluster, facts={}))

    @property
    def has_cluster(self) -> bool:
        """Whether somebody has said which machines there are."""
        return self.inputs.cluster is not _NO_CLUSTER


@dataclass(frozen=True)
class Attempt:
    """One way to train it. `plan` is None where none can be made, and `error` says why."""

    recipe: TrainRecipe
    decisions: tuple[Decision, ...]
    plan: Plan | None
    error: HomelabError | None = None

    @property
    def fits(self) -> bool:
        """Whether every rank has room, as far as is known."""
        return self.plan is not None and verdict.lack_of_memory(self.plan) is None

    @property
    def hours(self) -> float | None:
        """How long it takes; None where nobody knows."""
        return self.plan.time.hours if self.plan is not None and self.plan.time is not None else None


@dataclass(frozen=True)
class NewRecipe:
    """The result. `text` is what was written, `is_changed` whether that is new."""

    text: recipe_text.RecipeText
    chosen: Attempt
    seen: Seen
    rows: Rows
    is_changed: bool


def make(wish: Wish, cluster: Cluster | None, say: Say) -> NewRecipe:
    """Decide everything and write the recipe. Raises InputError for data that no training can read, and for a file that is somebody else's."""
    data_look.refuse_no_file(wish.data)
    before = wish.output.read_text(encoding="utf-8-sig") if wish.output.is_file() else None
    if before is not None:
        recipe_text.again(before, (), (), str(wish.output))  # refused before anybody is asked
    names = [wish.model] if wish.model else list(PROPOSED)
    seen = _look(wish, names[0], cluster, say)
    say("deciding")
    for name in names:
        seen = with_model(seen, name, wish) if name != names[0] else seen
        rows = rows_of(seen)
        chosen = choose(wish, name, seen, rows)
        if len(names) == 1 or (chosen.fits and (chosen.hours is None or chosen.hours <= _PROPOSED_HOURS)):
            break
    head = _head(rows, chosen)
    text = (
        recipe_text.fresh(head, chosen.decisions) if before is None else recipe_text.again(before, head, chosen.decisions, str(wish.output))
    )
    is_changed = text.text != before
    if is_changed:
        wish.output.write_text(text.text, encoding="utf-8")
    return NewRecipe(text, chosen, seen, rows, is_changed)


def _look(wish: Wish, model: str, cluster: Cluster | None, say: Say) -> Seen:
    draft = data_look.draft(_place(wish), model)
    items = inputs.of_recipe(draft, wish.output)
    fault = data_files.fault(items)
    if fault is not None:
        raise fault
    notes = []
    facts_sample = None
    plan_inputs = None
    if cluster is None:
        notes.append(
            "there is no cluster.toml, so this is decided for one card with 8 GB; `homelab init` finds your machines: then run this again"
        )
    elif not wish.offline:
        with Fleet(cluster) as fleet:
            evidence = gather.evidence(fleet, recipe=draft, material=items, port=draft.parallel.port, say=say)
            if evidence.facts:
                say("looking into the data")
                facts_sample = data_sample.look(fleet, evidence, draft, items, _PREVIEWS)
                plan_inputs = planner.inputs_from(evidence, draft, items, wish.output.stem)
        notes += [f"{name} did not answer and is left out: {error.message}" for name, error in evidence.unreachable.items()]
        if not evidence.facts:
            notes.append("no machine answers, so cluster.toml is believed; run this again when they are on")
    if plan_inputs is None:
        plan_inputs = planner.inputs_of(cluster or _NO_CLUSTER, {}, draft, items, wish.output.stem)
    sample = facts_sample
    if sample is None or sample.refused or not any(file.sum_tokens for file in sample.files.values()):
        local = data_look.here(draft, items, _PREVIEWS)
        if sample is None or sample.refused or any(file.sum_tokens for file in local.files.values()):
            sample = local
    seen = Seen(sample, tuple(items), plan_inputs, tuple(notes))
    data_look.refuse_bad_rows(seen.file)
    return _with_config(seen, draft)


def _with_config(seen: Seen, recipe: TrainRecipe) -> Seen:
    """The same with the model's config.json from the hub, if nobody here knows its shape."""
    of = dataclasses.replace(seen.inputs, recipe=recipe)
    if recipe.model.is_folder or of.config is not None or shape_of(recipe.model.name, of.facts, of.config) is not None:
        return dataclasses.replace(seen, inputs=of)
    fetched = hub_config.fetch(recipe.model)
    return dataclasses.replace(
        seen, inputs=dataclasses.replace(of, config=fetched.config), notes=(*seen.notes, *([fetched.note] if fetched.note else []))
    )


def with_model(seen: Seen, name: str, wish: Wish) -> Seen:
    """The same for another model: its rows have about as many tokens."""
    return _with_config(
        dataclasses.replace(seen, inputs=dataclasses.replace(seen.inputs, config=None)), data_look.draft(_place(wish), name)
    )


def rows_of(seen: Seen) -> Rows:
    """The data as the decisions need it: counted, or guessed from its size."""
    item = next(item for item in seen.items if item.role == "train")
    file = seen.file
    count = file.rows_read if file is not None and file.whole and file.rows_read else item.rows or (file.rows_read if file else 0) or 1
    if file is not None and file.tokens_sampled:
        mean = file.sum_tokens / file.tokens_sampled
        return Rows(count, file.longest_tokens, round(mean * count), file.loss_tokens / max(1, file.sum_tokens), True)
    tokens = max(count, (item.size_bytes or 0) // BYTES_PER_TOKEN)
    return Rows(count, max(1, 4 * tokens // count), tokens, 0.5, False)


def choose(wish: Wish, name: str, seen: Seen, rows: Rows) -> Attempt:
    """The attempt that fits and takes least time; without one, the attempt that comes nearest."""
    tried = [_attempt(wish, name, seen, rows, kind, checkpointing) for kind in ("lora", "qlora") for checkpointing in (False, True)]
    on_cards = any(one.plan.device == "cuda" if one.plan is not None else False for one in tried) or any(
        node.gpus for node in seen.inputs.cluster.nodes
    )
    fitting = [one for one in tried if one.fits and (on_cards or one.recipe.method.kind == "lora")]
    if fitting:
        return min(fitting, key=lambda one: (one.hours or 0) * (_FOUR_BITS_COST if one.recipe.method.kind == "qlora" else 1))
    smallest = tried[-1] if on_cards else tried[1]
    length = smallest.recipe.train.seq_len // 2
    while length >= _LEAST_SEQ_LEN:
        why = f"longer rows have no room; the longest has {rows.longest} tokens, and its end is cut"
        cut = _attempt(wish, name, seen, rows, smallest.recipe.method.kind, True, (length, why))
        if cut.fits:
            return cut
        length //= 2
    return smallest


def _attempt(wish: Wish, name: str, seen: Seen, rows: Rows, kind: str, checkpointing: bool, cut: tuple[int, str] | None = None) -> Attempt:
    kind_of_model, positions = model_config.kind_and_positions(name, seen.inputs.facts, seen.inputs.config)
    base = Base(kind_of_model, shape_of(name, seen.inputs.facts, seen.inputs.config), positions)
    ranks = sum(node.rank_count for node in seen.inputs.cluster.nodes)
    decided = decisions.of_training(rows, base, kind, ranks)
    if cut is not None:
        decided = decisions.shorter(decided, *cut)
    decided = (*_asked_for(wish, name, seen), *_method(kind, checkpointing), *decided)
    recipe = _recipe(decided)
    try:
        plan = planner.settled(dataclasses.replace(seen.inputs, recipe=recipe))[1]
    except HomelabError as error:
        return Attempt(recipe, decided, None, error)
    precision = next(choice.because for choice in plan.choices if choice.subject == "precision")
    decided = (*decided, Decision("train", "precision", plan.precision, precision))
    return Attempt(_recipe(decided), decided, plan)


def _method(kind: str, checkpointing: bool) -> Iterator[Decision]:
    reasons = {
        "lora": "adapters on a base in full precision: it has room",
        "qlora": "adapters on a base in 4 bits: in 16 bits it has no room, or is slower here (QLoRA)",
    }
    yield Decision("method", "kind", kind, reasons[kind])
    why = (
        "saves memory: activations are computed twice" if checkpointing else "there is room for all activations, so none is computed twice"
    )
    yield Decision("train", "gradient_checkpointing", checkpointing, why)


def _asked_for(wish: Wish, name: str, seen: Seen) -> Iterator[Decision]:
    yield Decision(
        "model", "name", name, "as you asked" if wish.model else "the largest of the proposed ones that these machines train in a night"
    )
    file = seen.file
    yield Decision(
        "data",
        "train",
        _place(wish),
        f"{file.rows_read} rows, read as {file.read_as}" if file is not None and file.read_as else "as you asked",
    )


def _place(wish: Wish) -> str:
    """The data as the recipe names it: relative to its folder, so that homelab ships it."""
    if wish.data.startswith("hub:"):
        return wish.data
    return os.path.relpath(Path(wish.data).expanduser().resolve(), wish.output.resolve().parent)


def _recipe(decided: Sequence[Decision]) -> TrainRecipe:
    content: dict[str, dict[str, Any]] = {}
    for one in decided:
        content.setdefault(one.section, {})[one.key] = one.value
    return data_look.parsed(content)


def _head(rows: Rows, chosen: Attempt) -> list[str]:
    counted = f"{rows.tokens / max(1, rows.count):.0f} tokens each in the mean{'' if rows.is_counted else ' (guessed)'}"
    return [
        f"{recipe_text.HEAD.removeprefix('# ')}: {chosen.recipe.model.name} learns {rows.count} rows, {counted}. Run it again, and it decides anew and keeps what you "
        "have edited. Sources of the reasons: homelab explain new. All keys: homelab explain recipe."
    ]
