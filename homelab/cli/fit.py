"""`homelab plan RECIPE --fit`: a copy of the recipe that fits into the memory that is free, with as few changes as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from homelab.config.recipe import Recipe
    from homelab.facts import Facts
    from homelab.planning.model import Plan

_SHOWN = 6


def write(
    recipe_file: Path,
    output: Path | None,
    recipe: Recipe,
    facts: Mapping[str, Facts],
    make: Callable[[], Plan],
    as_json: bool,
    options: str,
) -> int:
    """Find what makes every rank fit, write it, say what was changed. Writes nothing where everything fits. `options` are the next command's.

    Raises InputError where nothing helps, where the file is there already, and for a recipe that brings its own program.
    """
    from rich.console import Console

    from homelab.cli import common
    from homelab.errors import InputError
    from homelab.planning import fit
    from homelab.planning.command import file_word
    from homelab.planning.ranks import shape_of

    if recipe.model is None or recipe.data is None:
        raise InputError(
            "only recipes of the built-in worker can be made to fit", where=str(recipe_file), hint="leave out --fit"
        )
    try:
        shape = shape_of(recipe.model.name, facts)
        situation = fit.of_plan(make(), shape, facts) if shape else None
    except fit.DoesNotFit as error:
        situation = error.situation
    if situation is None:
        raise InputError(
            "the model's shape or the nodes' memory is not known here, so there is nothing to fit to", where="[model] name in the recipe",
            hint="fetch the model on a node first, or give vram_gb in cluster.toml",
        )  # fmt: skip
    ways = fit.mendings(recipe, situation)
    if not ways and fit.lacking_bytes(recipe, situation) > 0:
        raise fit.nothing_helps(recipe, situation)
    place = output or recipe_file.with_name(f"{recipe_file.stem}-fit.toml")
    if ways:
        _check(place, recipe_file, recipe)
        place.write_text(fit.edited(recipe_file.read_text(encoding="utf-8"), ways[0].edits), encoding="utf-8")
    if as_json:
        shown = [
            {
                "edits": [str(edit) for edit in way.edits],
                "gain_bytes": way.gain_bytes,
                "alters_training": way.alters_training,
            }
            for way in ways
        ]
        common.print_json({"written": str(place) if ways else None, "mendings": shown})
        return 0
    console = Console(highlight=False)
    if not ways:
        console.print("Every rank fits: nothing was changed, nothing was written.", markup=False)
        return 0
    console.print(f"Written: {place}", markup=False, soft_wrap=True)
    for edit in ways[0].edits:
        console.print(
            f"  {edit}{'  (alters the training)' if edit.alters_training else ''}", markup=False, soft_wrap=True
        )
    console.print(f"  saves {ways[0].gain_bytes / 1e9:.1f} GB on the rank that lacks most", markup=False)
    if len(ways) > 1:
        console.print("Instead of that:", markup=False)
        for way in ways[1:_SHOWN]:
            console.print(f"  {way}", markup=False, soft_wrap=True)
    console.print(f"Next: homelab plan {file_word(str(place))}{options}", markup=False, soft_wrap=True)
    return 0


def _check(place: Path, recipe_file: Path, recipe: Recipe) -> None:
    """Raises InputError for a file that is there, and for a folder in which the recipe's data would not be found."""
    from homelab.errors import InputError

    if place.exists():
        raise InputError(
            f"{place} is there already, and is not overwritten",
            where="--fit",
            hint=f"rm {place}, or --output ANOTHER.toml",
        )
    assert recipe.data is not None
    relative = [
        name for name in (recipe.data.train, recipe.data.eval) if name and not name.startswith(("/", "~/", "hub:"))
    ]
    if relative and place.resolve().parent != recipe_file.resolve().parent:
        raise InputError(
            f"the recipe's data, {relative[0]}, is looked for beside the recipe",
            where=f"--output {place}",
            hint=f"--output {recipe_file.with_name(place.name)}",
        )
    if not place.parent.is_dir():
        raise InputError(
            f"there is no folder {place.parent}", where=f"--output {place}", hint=f"mkdir -p {place.parent}"
        )
