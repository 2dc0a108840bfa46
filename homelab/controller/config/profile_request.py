"""`homelab launch --profile STEPS --profile-ranks RANKS`: which steps are profiled, on which ranks. Pure.

It is a wish about one launch and not a key of the recipe: it never changes the training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from homelab.controller.base.errors import InputError
from homelab.controller.config.recipe import Recipe, ScriptRecipe

WARM_STEPS = 5  # they pay for connecting, for DDP's order of its buckets and for measuring the speeds
MOST_STEPS = 20  # no viewer opens a trace of many more
_COUNT = re.compile(r"\d{1,9}")
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")


@dataclass(frozen=True)
class ProfileRequest:
    """What a person asked for. `first` None: after the steps that are not usual. `ranks` None: all."""

    text: str
    count: int
    first: int | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ProfiledSteps:
    """What the worker is told in run.json (`homelab.shared.protocol.profile_files`): steps `first_step` to `last_step`, counted from 1."""

    first_step: int
    last_step: int
    ranks: tuple[int, ...]


def parse(steps: str, ranks: str) -> ProfileRequest | None:
    """The two options; None where neither is given. Raises InputError for what is none of their forms."""
    if not steps:
        if ranks:
            raise InputError(
                "the steps to profile are missing", where=f"--profile-ranks {ranks}", hint=f"--profile 3 --profile-ranks {ranks}"
            )
        return None
    chosen = _ranks(ranks)
    if _COUNT.fullmatch(steps):
        count, first = int(steps), None
    elif (match := _RANGE.fullmatch(steps)) is not None:
        first = int(match[1])
        count = int(match[2]) - first + 1
    else:
        raise InputError(
            f"{steps!r} names no steps", where=f"--profile {steps}", hint="--profile 3 for three steps, --profile 8-10 for these"
        )
    if count < 1 or first == 0:
        raise InputError(
            "steps are counted from 1, and the last one must not be before the first",
            where=f"--profile {steps}",
            hint="--profile 3, or --profile 8-10",
        )
    if count > MOST_STEPS:
        begin = first or WARM_STEPS + 1
        raise InputError(
            f"{count} steps are too many for one profile: at most {MOST_STEPS}",
            where=f"--profile {steps}",
            hint=f"--profile {begin}-{begin + 2}; steps hardly differ",
        )
    return ProfileRequest(steps, count, first, chosen)


def _ranks(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(_COUNT.fullmatch(word) for word in words):
        raise InputError(
            f"{text!r} names no ranks", where=f"--profile-ranks {text}", hint="numbers with commas between them: --profile-ranks 0,2"
        )
    return tuple(sorted({int(word) for word in words}))


def refuse_early(request: ProfileRequest, recipe: Recipe, recipe_file: str) -> None:
    """Before any node is asked. Raises InputError for a [script], of which nobody but its program knows the steps, and for steps beyond the recipe's."""
    if isinstance(recipe, ScriptRecipe):
        raise InputError(
            "only the built-in worker makes profiles, and this recipe runs a [script]", where=f"{recipe_file}, --profile {request.text}",
            hint="launch without --profile, and use torch.profiler in the script",
        )  # fmt: skip
    _first_step(request, recipe.train.steps)


def chosen(request: ProfileRequest, steps: int | None, world_size: int) -> ProfiledSteps:
    """The steps and ranks of a run of so many steps (None: not known) on so many ranks. Raises InputError for steps or ranks that it does not have."""
    first = _first_step(request, steps)
    ranks = request.ranks if request.ranks is not None else tuple(range(world_size))
    strangers = [rank for rank in ranks if rank >= world_size]
    if strangers:
        known = ",".join(map(str, range(min(world_size, 8))))
        raise InputError(
            f"there is no rank {strangers[0]}: this run has {world_size} rank{'s' if world_size > 1 else ''}, counted from 0",
            where=f"--profile-ranks {','.join(map(str, ranks))}", hint=f"--profile-ranks {known}",
        )  # fmt: skip
    return ProfiledSteps(first, first + request.count - 1, ranks)


def _first_step(request: ProfileRequest, steps: int | None) -> int:
    """The first step to profile of `steps` (None: not known). Raises InputError where the last one is not among them."""
    first = request.first
    if first is None:
        first = WARM_STEPS + 1 if steps is None else max(1, min(WARM_STEPS + 1, steps - request.count + 1))
    last = first + request.count - 1
    if steps is not None and last > steps:
        edit = f"--profile {min(request.count, steps)}" if request.first is None or first > steps else f"--profile {first}-{steps}"
        raise InputError(f"the run ends after step {steps}, before step {last}", where=f"--profile {request.text}", hint=edit)
    return first
