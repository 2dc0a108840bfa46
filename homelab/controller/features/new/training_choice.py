"""Which training: of a few whole plans the one that fits and takes least time, for what was seen of data, model and machines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from homelab.controller.attempt import planner
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.units import listed
from homelab.controller.config.cluster import Cluster, Gpu, Node
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.features.new import data_look, decisions
from homelab.controller.features.new.decisions import Base, Decision, Rows
from homelab.controller.planning import verdict
from homelab.controller.planning.alternatives import advised_nodes
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.machines import cards
from homelab.controller.planning.model import model_config
from homelab.controller.planning.speed.dataset_size import BYTES_PER_TOKEN
from homelab.controller.planning.types import Plan
from homelab.controller.planning.work.job import shape_of
from homelab.shared.protocol.row_forms import LABELLED, PREFERENCE
from homelab.shared.protocol.worker_messages import FileSample, SampleResult

_FOUR_BITS_COST = 1.25  # a base in 4 bits has to be so much faster, because rounding it costs a little of the result
_NO_ROOM_FOR_16_BITS = "adapters on a base in 4 bits: in 16 bits it has no room (QLoRA)"
_LEAST_SEQ_LEN = 256
UNKNOWN_ROWS = 10_000  # of a data set of the hub that nobody here can count
# The card that is decided for while nobody has said which machines there are.
NO_CLUSTER = Cluster(nodes=(Node(name="one-card", host="localhost", gpus=(Gpu(model="RTX 4060", vram_gb=8.0),)),))


@dataclass(frozen=True)
class Wish:
    """What a person asks for. `model` "" leaves it to homelab; `output` is the recipe's file; `columns`: key of the recipe -> column of the data."""

    data: str
    model: str
    output: Path
    offline: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)


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
    def objective(self) -> str:
        """What the rows are for, where they say which of two answers is better, or whether an answer is good; else empty."""
        return {PREFERENCE: "dpo", LABELLED: "kto"}.get(self.file.form, "") if self.file is not None else ""

    @property
    def model(self) -> str:
        """The model that was looked at."""
        assert isinstance(self.inputs.recipe, TrainRecipe)
        return self.inputs.recipe.model.name

    @property
    def has_cluster(self) -> bool:
        """Whether somebody has said which machines there are."""
        return self.inputs.cluster is not NO_CLUSTER


@dataclass(frozen=True)
class Attempt:
    """One way to train it. `plan` is None where none can be made, and `error` says why.

    `inputs` are what it was planned from: the nodes that it is launched on. `because_of_nodes`: why those that are `left_out` are not among them.
    """

    recipe: TrainRecipe
    decisions: tuple[Decision, ...]
    plan: Plan | None
    inputs: PlanInputs
    left_out: tuple[str, ...] = ()
    because_of_nodes: str = ""
    error: HomelabError | None = None

    def because(self, place: str, reason: str) -> Attempt:
        """The same with another reason for one decision."""
        decided = tuple(dataclasses.replace(one, reason=reason) if one.place == place else one for one in self.decisions)
        return dataclasses.replace(self, decisions=decided)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that it is launched on, where these are not all of cluster.toml."""
        cluster = self.inputs.cluster
        return tuple(node.name for node in cluster.nodes) if cluster.left_out and self.plan is not None else ()

    @property
    def who(self) -> str:
        """In a sentence after "It trains on": the nodes, and why the others are left out. Empty where none is."""
        return f"{listed(self.nodes)}, without {listed(self.left_out)}: {self.because_of_nodes}" if self.left_out else ""

    @property
    def fits(self) -> bool:
        """Whether every rank has room, as far as is known."""
        return self.plan is not None and verdict.lack_of_memory(self.plan) is None

    @property
    def is_resident(self) -> bool:
        """Whether that holds with all layers on their devices."""
        return self.fits and self.plan is not None and not any(rank.streaming for rank in self.plan.ranks)

    @property
    def hours(self) -> float | None:
        """How long it takes; None where nobody knows."""
        return self.plan.time.hours if self.plan is not None and self.plan.time is not None else None


def rows_of(seen: Seen) -> Rows:
    """The data as the decisions need it: counted, or guessed from its size."""
    item = next(item for item in seen.items if item.role == "train")
    file = seen.file
    counted = file.rows_read if file is not None else 0
    count = (counted if counted and file is not None and file.whole else item.rows) or counted or UNKNOWN_ROWS
    if file is not None and file.tokens_sampled:
        mean = file.sum_tokens / file.tokens_sampled
        return Rows(count, file.longest_tokens, round(mean * count), file.loss_tokens / max(1, file.sum_tokens), True, seen.objective)
    tokens = max(count, (item.size_bytes or 0) // BYTES_PER_TOKEN)
    return Rows(count, max(1, BYTES_PER_TOKEN * tokens // count), tokens, 0.5, False, seen.objective)


def choose(wish: Wish, name: str, seen: Seen, rows: Rows) -> Attempt:
    """The attempt that fits and takes least time; without one, the attempt that comes nearest."""
    tried = [_attempt(wish, name, seen, rows, kind, checkpointing) for kind in ("lora", "qlora") for checkpointing in (False, True)]
    on_cards = has_cards(seen)
    fitting = [one for one in tried if one.is_resident and (on_cards or one.recipe.method.kind == "lora")]
    if fitting:
        best = min(fitting, key=lambda one: (one.hours or 0) * (_FOUR_BITS_COST if one.recipe.method.kind == "qlora" else 1))
        return best if any(one.recipe.method.kind == "lora" for one in fitting) else best.because("method.kind", _NO_ROOM_FOR_16_BITS)
    smallest = tried[-1] if on_cards else tried[1]
    if smallest.fits:  # with layers from the host, before rows lose their end
        return smallest.because("method.kind", _NO_ROOM_FOR_16_BITS) if on_cards else smallest
    length = smallest.recipe.train.seq_len // 2
    while length >= _LEAST_SEQ_LEN:
        why = f"longer rows have no room; the longest has {rows.longest} tokens, and its end is cut"
        cut = _attempt(wish, name, seen, rows, smallest.recipe.method.kind, True, (length, why))
        if cut.fits:
            return cut.because("method.kind", _NO_ROOM_FOR_16_BITS) if on_cards else cut
        length //= 2
    return smallest


def has_cards(seen: Seen) -> bool:
    """Whether a machine has a card, by its own words or by cluster.toml."""
    return any(node.gpus for node in seen.inputs.cluster.nodes) or any(cards.everything(facts) for facts in seen.inputs.facts.values())


def _attempt(wish: Wish, name: str, seen: Seen, rows: Rows, kind: str, checkpointing: bool, cut: tuple[int, str] | None = None) -> Attempt:
    kind_of_model, positions = model_config.kind_and_positions(name, seen.inputs.facts, seen.inputs.config)
    base = Base(kind_of_model, shape_of(name, seen.inputs.facts, seen.inputs.config), positions)
    ranks = sum(node.rank_count for node in seen.inputs.cluster.nodes)  # of all, so that the batch does not depend on who is fast today
    decided = decisions.of_training(rows, base, kind, ranks)
    if cut is not None:
        decided = decisions.shorter(decided, *cut)
    decided = (*_asked_for(wish, name, seen), *_method(kind, checkpointing), *decided)
    attempt = planned(_recipe(decided), decided, seen)
    if attempt.plan is None or not seen.has_cluster:  # a card that nobody has decides no precision
        return attempt
    because = next(choice.because for choice in attempt.plan.choices if choice.subject == "precision")
    decided = (*decided, Decision("train", "precision", attempt.plan.precision, because))
    return dataclasses.replace(attempt, recipe=_recipe(decided), decisions=decided)


def planned(recipe: TrainRecipe, decided: tuple[Decision, ...], seen: Seen) -> Attempt:
    """A recipe with its plan on the nodes that the plan itself advises, or with the error for which there is none."""
    inputs = dataclasses.replace(seen.inputs, recipe=recipe)
    try:
        advised = advised_nodes.follow(inputs, lambda of: planner.settled(of)[1])
    except HomelabError as error:
        return Attempt(recipe, decided, None, inputs, error=error)
    return Attempt(recipe, decided, advised.plan, advised.inputs, advised.left_out, advised.because)


def _method(kind: str, checkpointing: bool) -> Iterator[Decision]:
    reasons = {
        "lora": "adapters on a base in full precision: it has room",
        "qlora": "adapters on a base in 4 bits: faster here than 16 bits (QLoRA)",
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
        place(wish),
        f"{file.rows_read} row{'' if file.rows_read == 1 else 's'}, read as {file.read_as}"
        if file is not None and file.read_as
        else "as you asked",
    )
    if wish.columns:
        yield Decision("data", "columns", dict(wish.columns), "as you asked")


def place(wish: Wish) -> str:
    """The data as the recipe names it: relative to its folder, so that homelab ships it."""
    if wish.data.startswith("hub:"):
        return wish.data
    data = Path(os.path.expanduser(wish.data))  # a link keeps its name: the file behind it may have none of its own
    return os.path.relpath(data.parent.resolve() / data.name, wish.output.resolve().parent)


def _recipe(decided: Sequence[Decision]) -> TrainRecipe:
    content: dict[str, dict[str, Any]] = {}
    for one in decided:
        content.setdefault(one.section, {})[one.key] = one.value
    return data_look.parsed(content)
