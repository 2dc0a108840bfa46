"""`homelab new`: write the recipe for a data file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, terminal

if TYPE_CHECKING:
    from homelab.controller.config.cluster import Cluster
    from homelab.controller.features.new.new_recipe import NewRecipe


def command(
    data: Annotated[str, typer.Argument(metavar="DATA", help="The rows: a file, or hub:org/name.", show_default=False)] = "",
    model: Annotated[
        str, typer.Option("--model", "-m", help="The base model: org/name, or a folder that is on every node.", show_default=False)
    ] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The recipe to write. Default: the data's name with .toml.", show_default=False)
    ] = None,
    columns: Annotated[
        str,
        typer.Option(
            "--columns", metavar="KEY=COLUMN,...", help="Which column is which: prompt=question,completion=answer", show_default=False
        ),
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no node: believe cluster.toml.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    as_json: common.JsonOption = False,
) -> int:
    """Look at the data, the machines and the model, and write a recipe with the reason of each value. Run again, it keeps your edits."""
    from homelab.controller.features.new import data_look, new_recipe
    from homelab.controller.features.new.training_choice import Wish

    data, model = _asked_for(data, model, yes)
    wish = Wish(data, model, output or Path(_name(data)), offline, data_look.columns_of(columns))
    with common.progress(as_json) as say:
        made = new_recipe.make(wish, _cluster(cluster), say)
    if as_json:
        common.print_json(_document(made, wish.output))
    else:
        _print(made, wish.output, common.same_options(cluster))
    return made.verdict.exit_code


def _asked_for(data: str, model: str, yes: bool) -> tuple[str, str]:
    """The two things that nobody else can know; what is left open is asked for, and may stay open for the model."""
    from homelab.cli.questions import asked
    from homelab.controller.base.hint import Hint, homelab

    hint = Hint("{}", homelab("new DATA --model org/name"))
    if not data:
        data = asked(lambda: terminal.prompt("which rows? a file, or hub:org/name"), "for the data", "homelab new", hint)
        if not model and not yes:
            question = "which model? org/name, or a folder (nothing: homelab chooses)"
            model = asked(lambda: terminal.prompt(question, ""), "for the model", "homelab new", hint)
    return data, _on_every_node(model)


def _on_every_node(model: str) -> str:
    """A model folder of this machine by a name that holds on every node: below `~` if it is in this person's home. Others as they are."""
    folder = Path(os.path.abspath(os.path.expanduser(model)))
    if not model or not folder.joinpath("config.json").is_file():
        return model
    return f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)


def _name(data: str) -> str:
    return f"{Path(data.removeprefix('hub:')).stem}.toml"


def _cluster(path: Path) -> Cluster | None:
    """The cluster; None if nobody has named one and none is found, or for the example that homelab ships."""
    from homelab.controller.config.example import is_example

    if path == common.DEFAULT_CLUSTER and not path.exists():
        return None
    cluster = common.described_cluster(path)
    return None if is_example(path.read_bytes()) else cluster


def _print(made: NewRecipe, file: Path, options: str) -> None:
    from homelab.cli import row_preview
    from homelab.controller.base.hint import for_recipe, with_options
    from homelab.controller.planning.render import answer

    def named(hint: str) -> str:
        return for_recipe(with_options(hint, lambda name: options), str(file))

    chosen = made.chosen
    how = {"lora": "as adapters", "qlora": "as adapters on a base in 4 bits", "full": "with all its weights"}[chosen.recipe.method.kind]
    wrote = "Wrote" if made.is_changed else "Nothing to change in"
    terminal.echo(f"{wrote} {file}: {chosen.recipe.model.name} learns {made.rows.words} {how}.")
    terminal.echo(answer.of(chosen.plan, made.verdict) if chosen.plan is not None else f"{made.verdict.title}: {made.verdict.seen}")
    if chosen.who:
        terminal.echo(f"It trains on {chosen.who}.")
    if not made.verdict.runs:
        terminal.echo(f"First: {named(made.verdict.edit)}")
    if made.seen.file is not None and made.seen.file.previews:
        terminal.echo()
        row_preview.show(made.seen.file)
        terminal.echo()
    for one in made.text.kept:
        terminal.echo(f"yours: {one.place} stays as you wrote it; homelab would take {one.value}: {one.reason}")
    for note in made.seen.notes:
        terminal.echo(f"note: {note}")
    terminal.echo(f"Next: {named(made.following)}")


def _document(made: NewRecipe, file: Path) -> dict[str, object]:
    """{"file", "written", "verdict", "hours", "decisions": [{"key", "value", "reason"}], "kept": [key, ...], "rows": {...},
    "nodes": [name, ...] (of the launch), "left_out": [name, ...], "because_of_nodes", "notes": [...]}."""
    from dataclasses import asdict

    chosen = made.chosen
    return {
        "file": str(file), "written": made.is_changed, "verdict": made.verdict.as_dict(), "hours": chosen.hours,
        "decisions": [{"key": one.place, "value": one.value, "reason": one.reason} for one in chosen.decisions],
        "kept": [one.place for one in made.text.kept], "rows": asdict(made.rows),
        "nodes": [node.name for node in chosen.inputs.cluster.nodes], "left_out": chosen.left_out, "because_of_nodes": chosen.because_of_nodes,
        "next": str(made.following.for_recipe(str(file))), "notes": list(made.seen.notes),
    }  # fmt: skip
