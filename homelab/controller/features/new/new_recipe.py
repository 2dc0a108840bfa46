"""`homelab new`: look at the data, the machines and the model, decide, and write the recipe."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path

from homelab.controller.attempt import base_model, data_files, hub_config, inputs, planner
from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Command, Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.config import load
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.features.new import data_look, decisions, recipe_text
from homelab.controller.features.new.decisions import Rows
from homelab.controller.features.new.training_choice import (
    NO_CLUSTER,
    UNKNOWN_ROWS,
    Attempt,
    Seen,
    Wish,
    choose,
    has_cards,
    place,
    planned,
    rows_of,
)
from homelab.controller.features.preflight import data_sample, gather
from homelab.controller.planning import verdict
from homelab.controller.planning.verdict import Verdict
from homelab.controller.planning.work.job import shape_of
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import store

_PREVIEWS = 3
# Proposed where no model is named, the best first: each has a chat template, and is free to use.
PROPOSED = (
    "Qwen/Qwen3-32B", "Qwen/Qwen3-14B", "Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
)  # fmt: skip
_PROPOSED_HOURS = 12.0


@dataclass(frozen=True)
class NewRecipe:
    """The result. `text` is what was written, `is_changed` whether that is new. `chosen` is the recipe as it stands in the file, a person's edits
    included, and `verdict` that on its plan."""

    text: recipe_text.RecipeText
    chosen: Attempt
    verdict: Verdict
    seen: Seen
    rows: Rows
    is_changed: bool

    @property
    def following(self) -> Command:
        """The command that is next, with RECIPE in the place of the file."""
        if not self.seen.has_cluster:
            return homelab("init")
        nodes, facts = self.chosen.nodes, self.chosen.inputs.facts
        used = [facts[node.name] for node in self.chosen.inputs.cluster.nodes if node.name in facts]
        if self.verdict.runs and any(not one.python.packages.get("torch") for one in used):
            return homelab("setup --recipe RECIPE", *nodes)
        verb, _, option = self.verdict.command.partition(" ")
        command = f"{verb} RECIPE {option}".rstrip()
        return homelab(f"{command} --nodes", ",".join(nodes)) if nodes else homelab(command)


def make(wish: Wish, cluster: Cluster | None, say: Say) -> NewRecipe:
    """Decide everything and write the recipe. Raises InputError for data that no training can read, and for a file that is somebody else's or cannot
    be written."""
    data_look.refuse_no_file(wish.data)
    before = _before(wish.output)
    edits = recipe_text.edits(before, str(wish.output)) if before is not None else {}  # refused before anybody is asked
    named = recipe_text.standing(before, str(wish.output)).get("data.columns") if before is not None else None
    columns = wish.columns or (named if isinstance(named, dict) else {})
    wish = dataclasses.replace(wish, model=wish.model or str(edits.get("model.name") or ""), columns=columns)
    seen = _look(wish, wish.model or PROPOSED[0], cluster, say)
    say("deciding")
    names = [wish.model] if wish.model else list(PROPOSED) if has_cards(seen) else [PROPOSED[-1]]
    for name in names:
        seen = with_model(seen, name, wish) if name != seen.model else seen
        rows = rows_of(seen)
        chosen = choose(wish, name, seen, rows)
        if len(names) == 1 or (chosen.is_resident and (chosen.hours is None or chosen.hours <= _PROPOSED_HOURS)):
            break
    seen = dataclasses.replace(seen, notes=(*seen.notes, *filter(None, [rows.few])))
    head = _head(rows, chosen)
    text = (
        recipe_text.fresh(head, chosen.decisions) if before is None else recipe_text.again(before, head, chosen.decisions, str(wish.output))
    )
    chosen = _as_written(text, chosen, seen, wish.output)
    if (passes := decisions.unsure_passes(rows, chosen.recipe.train)) is not None:
        both = homelab("queue add", str(wish.output), "--set", f"train.epochs={','.join(map(str, passes))}")
        note = Hint("how many passes so few rows need is only known after a try: {} trains with each, and says which learned more", both)
        seen = dataclasses.replace(seen, notes=(*seen.notes, note))
    if text.text != before:
        store.write_text(wish.output, text.text)
    return NewRecipe(text, chosen, _verdict(chosen, seen), seen, rows, text.text != before)


def _before(output: Path) -> str | None:
    """The text of the file that is there; None without one. Raises InputError for a place that nothing can be written to."""
    if not output.parent.is_dir():
        raise InputError("there is no such folder", where=str(output.parent), hint=Command(f"mkdir -p {shlex.quote(str(output.parent))}"))
    try:
        return output.read_text(encoding="utf-8-sig") if output.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"this file cannot be read: {why}", where=str(output), hint="name another one with --output FILE") from error


def _as_written(text: recipe_text.RecipeText, chosen: Attempt, seen: Seen, output: Path) -> Attempt:
    """The attempt with the edits of a person in it. Raises InputError for an edit that no recipe may have."""
    recipe = load.recipe_of_text(text.text, output)
    if recipe == chosen.recipe:
        return chosen
    if not isinstance(recipe, TrainRecipe):
        raise InputError("this recipe brings its own program now", where=str(output), hint="write another file: --output FILE")
    return planned(recipe, chosen.decisions, seen)


def _verdict(chosen: Attempt, seen: Seen) -> Verdict:
    if chosen.plan is None:
        assert chosen.error is not None
        return Verdict(False, f"{chosen.error.message}: {chosen.error.where}", chosen.error.hint, "plan")
    others = base_model.beside(chosen.recipe)
    return verdict.of(chosen.plan, chosen.recipe, inputs=chosen.inputs, others=others, offline=not seen.inputs.facts)


def _look(wish: Wish, model: str, cluster: Cluster | None, say: Say, *, objective: str = "") -> Seen:
    draft = data_look.draft(place(wish), model, wish.columns, objective=objective)
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
            evidence = gather.evidence(fleet, recipe=draft, material=items, port=draft.parallel.port, say=say, for_person=True)
            if evidence.facts:
                say("looking into the data")
                facts_sample = data_sample.look(fleet, evidence, draft, items, _PREVIEWS)
                plan_inputs = planner.inputs_from(evidence, draft, items, wish.output.stem)
        notes += [f"{name} did not answer and is left out: {error.message}" for name, error in evidence.unreachable.items()]
        if not evidence.facts:
            notes.append("no machine answers, so cluster.toml is believed; run this again when they are on")
    if plan_inputs is None:
        plan_inputs = planner.inputs_of(cluster or NO_CLUSTER, {}, draft, items, wish.output.stem)
    sample = facts_sample
    if sample is None or sample.refused or not any(file.sum_tokens for file in sample.files.values()):
        local = data_look.here(draft, items, _PREVIEWS)
        is_unread = sample is None or sample.refused or any(file.unread for file in sample.files.values())
        if is_unread or any(file.sum_tokens for file in local.files.values()):
            sample = local
    wanted = data_look.objective_for(sample) if not wish.columns.keys() & {"completion", "messages", "text"} else ""
    if wanted and not objective:
        return _look(wish, model, cluster, say, objective=wanted)
    seen = Seen(sample, tuple(items), plan_inputs, tuple(notes))
    data_look.refuse_bad_rows(seen.file, wish.data, wish.columns)
    seen = Seen(sample, tuple(items), plan_inputs, (*notes, *_uncounted(seen)))
    return _with_config(seen, draft, wish)


def _uncounted(seen: Seen) -> list[str]:
    """What a person should know if the rows were not all counted."""
    item, file = next(item for item in seen.items if item.role == "train"), seen.file
    if item.rows is not None or (file is not None and file.whole):
        return []
    if file is not None and file.rows_read:
        return [
            f"only the first {file.rows_read} rows were looked at, and epochs and batch are decided for them: more rows need fewer epochs"
        ]
    if file is not None and file.unread:
        return [f"{file.unread}; so this is decided for {UNKNOWN_ROWS} rows"]
    return [f"the rows could not be looked at, so this is decided for {UNKNOWN_ROWS} of them; run it again when a node can read them"]


def _with_config(seen: Seen, recipe: TrainRecipe, wish: Wish) -> Seen:
    """The same with the model's config.json from the hub, if nobody here knows its shape."""
    of = dataclasses.replace(seen.inputs, recipe=recipe)
    if wish.offline or recipe.model.is_folder or of.config is not None or shape_of(recipe.model.name, of.facts, of.config) is not None:
        return dataclasses.replace(seen, inputs=of)
    fetched = hub_config.fetch(recipe.model)
    return dataclasses.replace(
        seen, inputs=dataclasses.replace(of, config=fetched.config), notes=(*seen.notes, *([fetched.note] if fetched.note else []))
    )


def with_model(seen: Seen, name: str, wish: Wish) -> Seen:
    """The same for another model: its rows have about as many tokens."""
    return _with_config(
        dataclasses.replace(seen, inputs=dataclasses.replace(seen.inputs, config=None)),
        data_look.draft(place(wish), name, wish.columns, objective=seen.objective),
        wish,
    )


def _head(rows: Rows, chosen: Attempt) -> list[str]:
    counted = f"{rows.tokens / max(1, rows.count):.0f} tokens a row in the mean{'' if rows.is_counted else ' (guessed)'}"
    return [
        f"{recipe_text.HEAD.removeprefix('# ')}: {chosen.recipe.model.name} learns {rows.words}, {counted}. Run it again, and it decides anew and keeps what you "
        "have edited. Sources of the reasons: homelab explain new. All keys: homelab explain recipe.",
        *([f"Decided for {chosen.who}."] if chosen.who else ()),
    ]
