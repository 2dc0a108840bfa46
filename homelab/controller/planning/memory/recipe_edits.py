"""How a training fits into the free memory: the smallest changes of the recipe, each with its gain. Pure.

A change is either one that leaves the training as it is (micro_batch, gradient_checkpointing, fused_loss) or one that alters it
(seq_len, optimizer, quantisation, adapter rank), and says so; the first kind comes first.
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.memory.scenario import SHORTEST_ROW, DoesNotFit, MemoryScenario, RankMemory, each_lacking, lacking_bytes

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

_GB = 1e9
_MOST_EDITS = 4
_SHARDED = ("zero2", "zero3", "fsdp", "hsdp")  # they refuse 8-bit states, whose blocks shards would cut elsewhere
_NOTHING = "take a smaller model, or add a machine with more memory"


@dataclass(frozen=True, slots=True)
class Edit:
    """One key of the recipe and its new value, written as in TOML."""

    section: str
    key: str
    value: bool | int | str
    before: bool | int | str
    alters_training: bool

    def __str__(self) -> str:
        return f"[{self.section}] {self.key} = {_toml(self.value)} (was {_toml(self.before)})"


@dataclass(frozen=True, slots=True)
class RecipeFix:
    """Edits that together make every rank fit. `gain_bytes` is what they save on the rank that lacks the most memory."""

    edits: tuple[Edit, ...]
    gain_bytes: int

    @property
    def alters_training(self) -> bool:
        """True when any of its edits does."""
        return any(edit.alters_training for edit in self.edits)

    def __str__(self) -> str:
        kind = "alters the training" if self.alters_training else "same training"
        return f"{' and '.join(map(str, self.edits))}: saves {self.gain_bytes / _GB:.1f} GB, {kind}"


def impossible(recipe: TrainRecipe, scenario: MemoryScenario) -> DoesNotFit:
    """The error for a recipe of which no rank takes a row of seq_len tokens: by how many GB on each node, and what would make it fit."""
    shortages = each_lacking(recipe, scenario)
    best = dataclasses.replace(scenario, ranks=(shortages[0][1],))
    if ways := fixes(recipe, scenario):
        hint: str = Hint("{} writes a recipe that fits. Least: {}", homelab("plan RECIPE --fit"), ways[0])
    elif ways := fixes(recipe, best):
        others = "" if len(shortages) == 1 else f", without the nodes that lack more: --nodes {shortages[0][1].node}"
        hint = f"make it fit on the rank that lacks least{others}: {ways[0]}"
    else:
        hint = _NOTHING
    return DoesNotFit(
        f"no rank has room for a row of {recipe.train.seq_len} tokens: {_listed(shortages)}",
        where="recipe, [train] seq_len",
        hint=hint,
        scenario=scenario,
    )


def nothing_helps(recipe: TrainRecipe, scenario: MemoryScenario) -> DoesNotFit:
    """The error for a recipe that none of the known changes makes fit on every rank."""
    shortages = each_lacking(recipe, scenario)
    enough = [rank.node for short, rank in shortages if short <= 0]
    return DoesNotFit(
        f"no change of the recipe makes it fit on every rank: {_listed([entry for entry in shortages if entry[0] > 0])}",
        where="recipe, [model] name",
        hint=f"leave out the nodes that lack memory: --nodes {','.join(dict.fromkeys(enough))}" if enough else _NOTHING,
        scenario=scenario,
    )


def _listed(shortages: Sequence[tuple[int, RankMemory]]) -> str:
    return "; ".join(
        f"rank {rank.rank} on {rank.node} lacks {short / _GB:.1f} GB ({(rank.available_bytes - rank.held_bytes) / _GB:.1f} GB are free)"
        for short, rank in shortages
    )


def fixes(recipe: TrainRecipe, scenario: MemoryScenario) -> tuple[RecipeFix, ...]:
    """Every smallest set of edits after which all ranks fit (none of its parts would do), best first: what does not alter the
    training, then fewer edits, then the smaller gain. Empty when everything fits already, or when nothing helps."""
    worst = lacking_bytes(recipe, scenario)
    if worst <= 0:
        return ()
    ways: list[RecipeFix] = []
    for count in range(1, _MOST_EDITS + 1):
        for edits in itertools.combinations(_candidates(recipe, scenario), count):
            keys = [(edit.section, edit.key) for edit in edits]
            if len(set(keys)) < count or any(set(smaller_way.edits) <= set(edits) for smaller_way in ways):
                continue
            try:
                left = lacking_bytes(changed(recipe, edits), scenario)
            except ValidationError:  # these two do not go together
                continue
            if left <= 0:
                ways.append(RecipeFix(edits, worst - left))
    smaller: list[RecipeFix] = []  # of the same keys only the smallest cut, which came first
    for way in ways:
        if not any(_same_keys(smaller_way.edits, way.edits) for smaller_way in smaller):
            smaller.append(way)
    return tuple(sorted(smaller, key=lambda way: (sum(edit.alters_training for edit in way.edits), len(way.edits), way.gain_bytes)))


def changed(recipe: TrainRecipe, edits: Iterable[Edit]) -> TrainRecipe:
    """The recipe with the edits in it."""
    content = recipe.model_dump(exclude_none=True)
    for edit in edits:
        content[edit.section][edit.key] = edit.value
    return TrainRecipe.model_validate(content)


def _same_keys(one: Sequence[Edit], other: Sequence[Edit]) -> bool:
    return [(edit.section, edit.key) for edit in one] == [(edit.section, edit.key) for edit in other] and one != other


def _candidates(recipe: TrainRecipe, scenario: MemoryScenario) -> Iterator[Edit]:
    train, method = recipe.train, recipe.method
    micro_batch = recipe.parallel.micro_batch
    if isinstance(micro_batch, int):
        rows = micro_batch // 2
        while rows >= 1:
            yield Edit("parallel", "micro_batch", rows, micro_batch, False)
            rows //= 2
    if not train.gradient_checkpointing:
        yield Edit("train", "gradient_checkpointing", True, False, False)
    if not train.fused_loss:
        yield Edit("train", "fused_loss", True, False, False)
    is_sharded = recipe.parallel.strategy in _SHARDED or scenario.division.parts > 1
    if train.optimizer == "adamw" and not is_sharded:
        yield Edit("train", "optimizer", "adamw_8bit", "adamw", True)
    if train.optimizer != "paged_adamw_8bit" and not is_sharded and scenario.device == "cuda" and scenario.pages:
        yield Edit("train", "optimizer", "paged_adamw_8bit", train.optimizer, True)
    if method.kind == "lora" and not scenario.shape.widened:
        yield Edit("method", "base", *(("8bit", "auto") if method.base == "auto" else ("auto", "8bit")), True)
        yield Edit("method", "kind", "qlora", "lora", True)  # with base = "auto" alone
    if method.kind != "full" and method.rank >= 2:
        yield Edit("method", "rank", method.rank // 2, method.rank, True)
    for part in (2, 4, 8):
        if train.seq_len // part >= SHORTEST_ROW:
            yield Edit("train", "seq_len", train.seq_len // part, train.seq_len, True)


def edited(text: str, edits: Sequence[Edit]) -> str:
    """The recipe's text with the edits in it, every comment kept. Raises InputError for a text in which a key has no line
    of its own (inline tables)."""
    import tomlkit  # here: only `plan --fit` needs it

    document, expected = tomlkit.parse(text.removesuffix("\n") + "\n"), tomllib.loads(text)
    for edit in edits:
        expected.setdefault(edit.section, {})[edit.key] = edit.value
        _replace(document, edit)
    result = document.as_string()
    if tomllib.loads(result) != expected:
        raise InputError(
            "not every key of this recipe has its own line, so homelab cannot edit it",
            where="recipe",
            hint=f"edit by hand: {'; '.join(map(str, edits))}",
        )
    return result


def _replace(document: TOMLDocument, edit: Edit) -> None:
    """Change or add one key, in place; an inline table stays as it is."""
    from tomlkit.items import AbstractTable, Table

    table = document.setdefault(edit.section, {})
    if not isinstance(table, Table):
        return
    body = table.value.body
    end = max((number for number, (key, entry) in enumerate(body, 1) if key and not isinstance(entry, AbstractTable)), default=0)
    if edit.key in table or end == len(body):
        table[edit.key] = edit.value
    else:  # tomlkit itself adds below the comments that lead the next section
        table.value._insert_at(end, edit.key, edit.value)


def _toml(value: bool | int | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
