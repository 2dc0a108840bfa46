"""The sequence of `homelab merge`: the node that holds the adapter and has the most memory puts it into its base."""

from __future__ import annotations

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.models import DisplayValue
from homelab.controller.base.say import Say
from homelab.controller.features.results import best_copy, fetch, make
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths


class Merged(DisplayValue):
    """What was merged. `losses`: per token over `rows` of the run's data, by name; `folder`: on the node, below the run's."""

    run: str
    node: str
    folder: str
    losses: dict[str, float | None]
    notes: tuple[str, ...]


def merge(fleet: Fleet, paths: RunPaths, base: str, say: Say) -> Merged:
    """Raises InputError for a run without adapters, or a base that it has not, HomelabError where memory or disk do not take it."""
    run_folder.refuse_scores(paths)
    say("searching for the node that has the adapter")
    results, errors = fetch.results_of(fleet, paths)
    method = run_folder.description_of(paths).recipe.method
    if method is None or method.kind == "full":
        raise InputError(
            "all weights were trained: the result is a whole model, so there is nothing to merge", where=f"{paths.name}: [method] kind",
            hint=Hint("{}", homelab("fetch", paths.name)),
        )  # fmt: skip
    if base == "dequantised" and method.quantisation is None:
        raise InputError(
            f"the base of {method.kind} is not quantised",
            where=f"{paths.name}: --base dequantised",
            hint=homelab("merge --base original", paths.name),
        )
    chosen = fetch.exported(fleet, paths, best_copy.choose(paths.name, results, errors), say)
    made = make.run_node_program(fleet.agent(chosen.node), "merge", {"run": paths.name, "folder": chosen.folder, "base": base}, say)
    return Merged(run=paths.name, node=chosen.node, folder=made.folder, losses=made.figures, notes=made.notes)
