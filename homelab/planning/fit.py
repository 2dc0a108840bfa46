"""What would make a training fit into the memory that is free: the smallest changes of the recipe, each with its gain. Pure.

A change is either one that leaves the training as it is (micro_batch, gradient_checkpointing, fused_loss) or one that alters it
(seq_len, optimizer, quantisation, adapter rank), and says so; the first kind comes first.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from homelab.config.recipe import Recipe
from homelab.errors import InputError
from homelab.facts import Facts
from homelab.planning import memory
from homelab.planning.architecture import Architecture
from homelab.planning.attention import repeats_keys
from homelab.planning.model import Plan
from homelab.planning.wsl import without_paging

_GB = 1e9
_MOST_EDITS = 4
_NOTHING = "take a smaller model, or add a machine with more memory"
SHORTEST_ROW = 8  # the least that a recipe may say


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's card or machine: all its memory, and what of it is not free now, in bytes. `repeats_keys`, `measured`: as in `memory.estimate`."""

    rank: int
    node: str
    available_bytes: int
    held_bytes: int = 0
    repeats_keys: bool = False
    measured: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Situation:
    """What the memory of every rank depends on, beside the recipe. `places` are those whose memory is known. `pages`: every card can (`wsl`)."""

    shape: Architecture
    precision: str
    device: str
    world_size: int
    places: tuple[Place, ...]
    pages: bool = True


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
class Mending:
    """Edits that together make every place fit. `gain_bytes` is what they save on the place that lacks most."""

    edits: tuple[Edit, ...]
    gain_bytes: int

    @property
    def alters_training(self) -> bool:
        """True when any of its edits does."""
        return any(edit.alters_training for edit in self.edits)

    def __str__(self) -> str:
        kind = "alters the training" if self.alters_training else "same training"
        return f"{' and '.join(map(str, self.edits))}: saves {self.gain_bytes / _GB:.1f} GB, {kind}"


class DoesNotFit(InputError):
    """No rank has room for a row of `seq_len` tokens. Carries the situation, so that `--fit` can look for what would mend it."""

    def __init__(self, message: str, *, where: str, hint: str, situation: Situation) -> None:
        super().__init__(message, where=where, hint=hint)
        self.situation = situation


def needed_bytes(recipe: Recipe, situation: Situation, place: Place, *, tokens: int | None = None) -> int:
    """Bytes at the peak for one row of `tokens` (default: seq_len), others' memory included; in the recipe's own micro-batch
    where it names one and `tokens` is not given."""
    assert recipe.train is not None and recipe.method is not None
    train = recipe.train if tokens is None else recipe.train.model_copy(update={"seq_len": tokens})
    asked = recipe.parallel.micro_batch
    rows = asked if isinstance(asked, int) and tokens is None else 1
    items = memory.estimate(
        situation.shape, recipe.method, train, precision=situation.precision, device=situation.device, micro_batch=rows,
        world_size=situation.world_size, masked=rows > 1 or _packed(recipe), compress=recipe.parallel.compress,
        repeats_keys=place.repeats_keys, held_by_others_bytes=place.held_bytes, measured=place.measured,
    )  # fmt: skip
    return sum(item.size_bytes for item in items)


def token_cap(recipe: Recipe, situation: Situation, place: Place) -> int | None:
    """The longest row that fits into this place alone; None when one of seq_len does, 0 when not even the shortest does."""
    assert recipe.train is not None

    def fits(tokens: int) -> bool:
        return needed_bytes(recipe, situation, place, tokens=tokens) <= place.available_bytes

    if fits(recipe.train.seq_len):
        return None
    if not fits(SHORTEST_ROW):
        return 0
    low, high = SHORTEST_ROW, recipe.train.seq_len  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def impossible(recipe: Recipe, situation: Situation) -> DoesNotFit:
    """The error for a recipe of which no place takes a row of seq_len tokens: by how many GB on each node, and what would mend it."""
    assert recipe.train is not None
    lacking = _each_lacking(recipe, situation)
    best = dataclasses.replace(situation, places=(lacking[0][1],))
    if ways := mendings(recipe, situation):
        hint = f"homelab plan RECIPE --fit writes a recipe that fits. Least: {ways[0]}"
    elif ways := mendings(recipe, best):
        others = "" if len(lacking) == 1 else f", leaving out what lacks more: --nodes {lacking[0][1].node}"
        hint = f"make it fit where least is lacking{others}: {ways[0]}"
    else:
        hint = _NOTHING
    return DoesNotFit(
        f"no rank has room for a row of {recipe.train.seq_len} tokens: {_listed(lacking)}",
        where="recipe, [train] seq_len",
        hint=hint,
        situation=situation,
    )


def nothing_helps(recipe: Recipe, situation: Situation) -> DoesNotFit:
    """The error for a recipe that none of the known changes makes fit on every rank."""
    lacking = _each_lacking(recipe, situation)
    enough = [place.node for short, place in lacking if short <= 0]
    return DoesNotFit(
        f"no change of the recipe makes it fit on every rank: {_listed([entry for entry in lacking if entry[0] > 0])}",
        where="recipe, [model] name",
        hint=f"leave out what lacks memory: --nodes {','.join(dict.fromkeys(enough))}" if enough else _NOTHING,
        situation=situation,
    )


def _each_lacking(recipe: Recipe, situation: Situation) -> list[tuple[int, Place]]:
    """How many bytes every place lacks for one row of seq_len tokens, the least first."""
    assert recipe.train is not None
    found = [
        (needed_bytes(recipe, situation, place, tokens=recipe.train.seq_len) - place.available_bytes, place)
        for place in situation.places
    ]
    return sorted(found, key=lambda entry: (entry[0], entry[1].rank))


def _listed(lacking: Sequence[tuple[int, Place]]) -> str:
    return "; ".join(
        f"rank {place.rank} on {place.node} lacks {short / _GB:.1f} GB ({(place.available_bytes - place.held_bytes) / _GB:.1f} GB are free)"
        for short, place in lacking
    )


def of_plan(plan: Plan, shape: Architecture, facts: Mapping[str, Facts]) -> Situation | None:
    """The situation that a plan was made for; None where no rank's memory is known."""
    places = []
    for rank in plan.ranks:
        if rank.memory is not None and rank.memory.available_bytes is not None:
            items = {item.name: item.size_bytes for item in rank.memory.items}
            beside = {name: items.get(name, 0) for name in memory.BESIDE_TORCH} if plan.device == "cuda" else {}
            repeats = repeats_keys(plan.device, plan.precision, rank.device_name)
            held = items.get(memory.HELD, 0)
            places.append(Place(rank.rank, rank.node, rank.memory.available_bytes, held, repeats, beside))
    pages = not without_paging((rank.node for rank in plan.ranks), facts)
    return Situation(shape, plan.precision, plan.device, plan.world_size, tuple(places), pages) if places else None


def mendings(recipe: Recipe, situation: Situation) -> tuple[Mending, ...]:
    """Every smallest set of edits after which all places fit (none of its parts would do), best first: what does not alter the
    training, then fewer edits, then the smaller gain. Empty when everything fits already, or when nothing helps."""
    worst = lacking_bytes(recipe, situation)
    if worst <= 0:
        return ()
    found: list[Mending] = []
    for count in range(1, _MOST_EDITS + 1):
        for edits in itertools.combinations(_candidates(recipe, situation), count):
            keys = [(edit.section, edit.key) for edit in edits]
            if len(set(keys)) < count or any(set(known.edits) <= set(edits) for known in found):
                continue
            left = lacking_bytes(changed(recipe, edits), situation)
            if left <= 0:
                found.append(Mending(edits, worst - left))
    smaller: list[Mending] = []  # of the same keys only the smallest cut, which came first
    for way in found:
        if not any(_same_keys(known.edits, way.edits) for known in smaller):
            smaller.append(way)
    return tuple(
        sorted(
            smaller, key=lambda way: (sum(edit.alters_training for edit in way.edits), len(way.edits), way.gain_bytes)
        )
    )


def changed(recipe: Recipe, edits: Iterable[Edit]) -> Recipe:
    """The recipe with the edits in it."""
    content = recipe.model_dump(exclude_none=True)
    for edit in edits:
        content[edit.section][edit.key] = edit.value
    return Recipe.model_validate(content)


def lacking_bytes(recipe: Recipe, situation: Situation) -> int:
    """By how many bytes the place that lacks most lacks room; negative when all fit."""
    return max(needed_bytes(recipe, situation, place) - place.available_bytes for place in situation.places)


def _same_keys(one: Sequence[Edit], other: Sequence[Edit]) -> bool:
    return [(edit.section, edit.key) for edit in one] == [(edit.section, edit.key) for edit in other] and one != other


def _candidates(recipe: Recipe, situation: Situation) -> Iterator[Edit]:
    train, method = recipe.train, recipe.method
    assert train is not None and method is not None
    asked = recipe.parallel.micro_batch
    if isinstance(asked, int):
        rows = asked // 2
        while rows >= 1:
            yield Edit("parallel", "micro_batch", rows, asked, False)
            rows //= 2
    if not train.gradient_checkpointing:
        yield Edit("train", "gradient_checkpointing", True, False, False)
    if not train.fused_loss:
        yield Edit("train", "fused_loss", True, False, False)
    if train.optimizer == "adamw":
        yield Edit("train", "optimizer", "adamw_8bit", "adamw", True)
    if train.optimizer != "paged_adamw_8bit" and situation.device == "cuda" and situation.pages:
        yield Edit("train", "optimizer", "paged_adamw_8bit", train.optimizer, True)
    if method.kind == "lora":
        yield Edit("method", "kind", "qlora", "lora", True)
    if method.kind != "full" and method.rank >= 2:
        yield Edit("method", "rank", method.rank // 2, method.rank, True)
    for part in (2, 4, 8):
        if train.seq_len // part >= SHORTEST_ROW:
            yield Edit("train", "seq_len", train.seq_len // part, train.seq_len, True)


def _packed(recipe: Recipe) -> bool:
    return recipe.data is not None and recipe.data.packing


def edited(text: str, edits: Sequence[Edit]) -> str:
    """The recipe's text with the edits in it, every comment kept. Raises InputError for a text in which a key cannot be found
    line by line (inline tables, dotted keys)."""
    wanted: dict[str, Any] = tomllib.loads(text)
    lines = text.splitlines(keepends=True)
    for edit in edits:
        wanted.setdefault(edit.section, {})[edit.key] = edit.value
        _replace(lines, edit)
    result = "".join(lines)
    try:
        same = tomllib.loads(result) == wanted
    except tomllib.TOMLDecodeError:
        same = False
    if not same:
        raise InputError(
            "this recipe's keys do not stand on lines of their own, so they cannot be edited for you",
            where="recipe",
            hint=f"edit by hand: {'; '.join(map(str, edits))}",
        )
    return result


def _replace(lines: list[str], edit: Edit) -> None:
    """Change or add one key, in place."""
    header = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
    key = re.compile(rf"(\s*{re.escape(edit.key)}\s*=\s*)(\"[^\"\n]*\"|'[^'\n]*'|[^#\n\"']*?)(\s*(?:#.*)?\n?)$")
    inside, last = False, None
    for number, line in enumerate(lines):
        if found := header.match(line):
            inside = found.group(1) == edit.section
            last = number if inside else last
        elif inside:
            if found := key.match(line):
                lines[number] = f"{found.group(1)}{_toml(edit.value)}{found.group(3)}"
                return
            if line.strip() and not line.lstrip().startswith("#"):
                last = number
    addition = f"{edit.key} = {_toml(edit.value)}\n"
    if last is None:
        lines += [*(["\n"] if not lines or lines[-1].endswith("\n") else ["\n\n"]), f"[{edit.section}]\n", addition]
    else:
        if not lines[last].endswith("\n"):
            lines[last] += "\n"
        lines.insert(last + 1, addition)


def _toml(value: bool | int | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
