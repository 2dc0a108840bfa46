"""`homelab plan RECIPE --fit`: a copy of the recipe that fits into the memory that is free, with as few changes as possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from homelab.cli import terminal

if TYPE_CHECKING:
    from homelab.controller.config.recipe import TrainRecipe
    from homelab.controller.planning.inputs import PlanInputs
    from homelab.controller.planning.memory.recipe_edits import RecipeFix
    from homelab.controller.planning.memory.scenario import MemoryScenario
    from homelab.controller.planning.types import Plan

_SHOWN = 6


def write(
    recipe_file: Path, output: Path | None, inputs: PlanInputs, make: Callable[[PlanInputs], Plan], as_json: bool, options: str
) -> int:
    """Find what makes every rank fit, write it, say what was changed. Writes nothing where everything fits. `options` are the next command's.

    Raises InputError where nothing helps, where the file is there already, and for a recipe that brings its own program.
    """
    from homelab.cli import common
    from homelab.controller.base.errors import InputError
    from homelab.controller.config.recipe import TrainRecipe
    from homelab.controller.planning.memory import recipe_edits, scenario
    from homelab.controller.run import store

    recipe = inputs.recipe
    if not isinstance(recipe, TrainRecipe):
        raise InputError("--fit works only with recipes of the built-in worker", where=str(recipe_file), hint="leave out --fit")
    memory = _scenario(recipe, inputs, make)
    ways = recipe_edits.fixes(recipe, memory)
    if not ways and scenario.lacking_bytes(recipe, memory) > 0:
        raise recipe_edits.nothing_helps(recipe, memory)
    file = output or recipe_file.with_name(f"{recipe_file.stem}-fit.toml")
    if ways:
        _check(file, recipe_file, recipe)
        with store.disk_errors_as_hints(file):
            file.write_text(recipe_edits.edited(recipe_file.read_text(encoding="utf-8-sig"), ways[0].edits), encoding="utf-8")
    if as_json:
        changes = [
            {"edits": [str(edit) for edit in way.edits], "gain_bytes": way.gain_bytes, "alters_training": way.alters_training}
            for way in ways
        ]
        common.print_json({"written": str(file) if ways else None, "mendings": changes})
    else:
        _print(file, ways, options)
    return 0


def _scenario(recipe: TrainRecipe, inputs: PlanInputs, make: Callable[[PlanInputs], Plan]) -> MemoryScenario:
    """The memory that has to be fitted into. Raises InputError where it, or the model's shape, is not known."""
    from homelab.controller.base.errors import InputError
    from homelab.controller.planning.memory import scenario
    from homelab.controller.planning.work.job import shape_of

    try:
        shape = shape_of(recipe.model.name, inputs.facts, inputs.config, recipe.method)
        memory = scenario.of_plan(make(inputs), shape, inputs.facts) if shape else None
    except scenario.DoesNotFit as error:
        memory = error.scenario
    if memory is None:
        raise InputError(
            "the model's shape or the memory of the nodes is not known here", where="[model] name in the recipe",
            hint="download the model on a node first, or give vram_gb in cluster.toml",
        )  # fmt: skip
    return memory


def _print(file: Path, ways: tuple[RecipeFix, ...], options: str) -> None:
    from homelab.controller.base import units
    from homelab.controller.base.shell import file_word

    if not ways:
        terminal.echo("Every rank fits: nothing was changed or written.")
        return
    terminal.echo(f"Written: {file}")
    for edit in ways[0].edits:
        terminal.echo(f"  {edit}{'  (alters the training)' if edit.alters_training else ''}")
    terminal.echo(f"  saves {units.gigabytes(ways[0].gain_bytes)} GB on the rank that lacks the most memory")
    if len(ways) > 1:
        terminal.echo("Instead of that:")
        for way in ways[1:_SHOWN]:
            terminal.echo(f"  {way}")
    terminal.echo(f"Next: homelab plan {file_word(str(file))}{options}")


def _check(file: Path, recipe_file: Path, recipe: TrainRecipe) -> None:
    """Raises InputError for a file that is there, and for a folder in which the recipe's data would not be found."""
    from homelab.cli import common
    from homelab.controller.base.errors import InputError
    from homelab.controller.base.shell import file_word

    common.checked_output(file)
    if file.exists():
        raise InputError(
            f"{file} exists already and is not overwritten", where="--fit", hint=f"rm {file_word(str(file))}, or --output ANOTHER.toml"
        )
    relative = [name for name in (recipe.data.train, recipe.data.eval) if name and not name.startswith(("/", "~/", "hub:"))]
    if relative and file.resolve().parent != recipe_file.resolve().parent:
        raise InputError(
            f"the recipe's data, {relative[0]}, is looked for in the folder of the recipe",
            where=f"--output {file}",
            hint=f"--output {file_word(str(recipe_file.with_name(file.name)))}",
        )
    if not file.parent.is_dir():
        raise InputError(f"there is no folder {file.parent}", where=f"--output {file}", hint=f"mkdir -p {file_word(str(file.parent))}")
