"""Recipes: the defaults, impossible values, and one error that lists all faults, each with its line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config.lines import key_lines, line_of
from homelab.controller.config.load import in_file, load_recipe
from homelab.controller.config.recipe import Recipe, ScriptRecipe, TrainRecipe, deciding, parse_recipe
from homelab.controller.run import fingerprint
from tests import builders

GOOD = """[model]
name = "/models/tiny"
[data]
train = "chats.jsonl"
[method]
kind = "lora"
[train]
global_batch = 12
steps = 10
learning_rate = 1e-3
"""
REPOSITORY = Path(__file__).resolve().parents[3]


def load(folder: Path, text: str) -> Recipe:
    file = folder / "recipe.toml"
    file.write_text(text, encoding="utf-8")
    return load_recipe(file)


def faults(folder: Path, text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        load(folder, text)
    assert caught.value.exit_code == 2 and "recipe.toml" in caught.value.where and caught.value.hint
    return caught.value.message.splitlines()[1:]


def test_defaults(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    assert isinstance(recipe, TrainRecipe)
    assert (recipe.method.rank, recipe.method.targets, recipe.train.seed, recipe.train.precision) == (16, "all-linear", 42, "auto")
    assert (recipe.parallel.shares, recipe.parallel.port, recipe.checkpoint.keep, recipe.recovery.max_restarts) == ("auto", 29500, 3, 5)
    assert recipe.data.completion_only and not recipe.data.packing


PAIRS = GOOD + '[objective]\nkind = "dpo"\n'
LABELS = GOOD + '[objective]\nkind = "kto"\n'


def test_an_objective_makes_rows_pairs_and_another_training(tmp_path: Path) -> None:
    recipe = load(tmp_path, PAIRS)
    assert recipe.data is not None and recipe.objective is not None and recipe.data.format == "preference"
    digests = ("train:abc",)
    written = parse_recipe(recipe.model_dump(mode="json"), strict=False)
    assert written == recipe and written.law_hash(digests) == recipe.law_hash(digests) != load(tmp_path, GOOD).law_hash(digests)
    assert load(tmp_path, PAIRS + "beta = 0.2\n").law_hash(digests) != recipe.law_hash(digests)
    assert load(tmp_path, PAIRS.replace("[method]", 'columns = { prompt = "q", chosen = "a", rejected = "b" }\n[method]'))
    assert load(tmp_path, PAIRS.replace("[method]", 'columns = { prompt = "q" }\n[method]'))
    law = deciding(recipe.model_dump(mode="json"))
    assert law["objective"] == {"kind": "dpo", "beta": 0.1, "gamma": None}, "keys that joined later leave older fingerprints as they are"
    judged = load(tmp_path, LABELS.replace("[method]", 'columns = { prompt = "q", label = "good" }\n[method]'))
    assert judged.data is not None and judged.data.format == "labelled"
    assert load(tmp_path, LABELS + "desirable_weight = 2\n").law_hash(digests) != load(tmp_path, LABELS).law_hash(digests)


@pytest.mark.parametrize(
    ("method", "counts"),
    [
        ({"kind": "lora", "dropout": 0.1}, True), ({"kind": "full", "model_dropout": True}, True),
        ({"kind": "lora"}, False), ({"kind": "full", "dropout": 0.1}, False),
    ],
)  # fmt: skip
def test_how_a_pass_draws_is_part_of_the_law_where_it_draws(method: dict[str, Any], counts: bool) -> None:
    """Other recipes, and the runs of older versions, keep their fingerprints."""
    recipe = builders.recipe(method=method)
    written = recipe.model_dump(mode="json")
    run = {"recipe": written, "data": {"train": {"sha256": "abc"}}}
    assert deciding(written, 2).get("draws") == (2 if counts else None) and recipe.method is not None and recipe.method.draws is counts
    assert fingerprint.fingerprint(run | {"draws": 2}) == recipe.law_hash(("train:abc",))
    assert (fingerprint.fingerprint(run) != recipe.law_hash(("train:abc",))) is counts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PAIRS.replace("[method]", 'format = "chat"\n[method]'), 'set it to "preference"'),
        (PAIRS.replace("[method]", "packing = true\n[method]"), "answers stay apart"),
        (PAIRS.replace("[method]", "completion_only = false\n[method]"), "the answers are compared"),
        (PAIRS.replace("[train]", 'backend = "unsloth"\n[train]'), "Unsloth computes its own loss"),
        (PAIRS.replace("[method]", 'columns = { prompt = "q", completion = "a" }\n[method]'), "names `chosen` and `rejected`"),
        (PAIRS.replace("[method]", 'columns = { messages = "q" }\n[method]'), "names `chosen` and `rejected`"),
        (PAIRS + "gamma = 0.5\n", '"dpo" has none'),
        (PAIRS + "desirable_weight = 2.0\n", 'are of `kind` = "kto"; "dpo" has none'),
        (LABELS + "desirable_weight = 0\nundesirable_weight = 0.0\n", "are both 0"),
        (LABELS.replace("[method]", 'columns = { prompt = "q", chosen = "a", rejected = "b" }\n[method]'), "and `label`"),
        (LABELS.replace("[method]", 'format = "preference"\n[method]'), 'set it to "labelled"'),
        (PAIRS.replace("[method]", 'columns = { label = "good" }\n[method]'), "names `chosen` and `rejected`"),
        (GOOD.replace("[method]", 'columns = { label = "good" }\n[method]'), 'add [objective] with kind = "kto"'),
        (GOOD.replace("[method]", 'columns = { chosen = "a", label = "good" }\n[method]'), "label (of one answer)"),
        (PAIRS.replace('"dpo"', '"dpoo"'), 'Did you mean "dpo"?'),
        (PAIRS + "beta = 0\n", "beta"),
        (GOOD.replace("[method]", 'format = "preference"\n[method]'), "add [objective]"),
        (GOOD.replace("[method]", 'columns = { chosen = "q", rejected = "a" }\n[method]'), "add [objective]"),
        ('[script]\npath = "a.py"\n[objective]\nkind = "dpo"\n', "remove [model], [data], [method], [train] and [objective]"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_an_objective_is_said(tmp_path: Path, text: str, said: str) -> None:
    found = faults(tmp_path, text)
    assert any(said in line for line in found), found


@pytest.mark.parametrize("file", builders.PROJECT_RECIPES, ids=lambda file: file.name)
def test_the_recipes_of_the_project_load(file: Path) -> None:
    assert load_recipe(file)


def test_every_fault_is_listed_at_once_with_its_line(tmp_path: Path) -> None:
    found = faults(tmp_path, """[model]
name = "models/tiny/x"
[data]
tran = "chats.jsonl"
[method]
kind = "qlorra"
[train]
global_batch = 0
steps = 10
epochs = 1
learning_rate = "fast"
shedule = "cosine"
[parallel]
shares = { a = -1 }
micro_batch = 0
strategy = "dpp"
[checkpont]
keep = 1
""")  # fmt: skip
    expected = [
        ("line 2", "a hub id like org/name, or a folder on every node"),
        ("line 3", '"train" is missing'),
        ("line 4", 'unknown key "tran". Did you mean "train"?'),
        ("line 6", 'Did you mean "qlora"?'),
        ("line 8", "greater than or equal to 1"),
        ("line 11", "allowed: a number"),
        ("line 12", 'unknown key "shedule". Did you mean "schedule"?'),
        ("line 14", "0 or more"),
        ("line 15", "1 or more"),
        ("line 16", 'Did you mean "ddp"?'),
        ("line 17", 'unknown key "checkpont". Did you mean "checkpoint"?'),
    ]
    assert len(found) == len(expected), "\n".join(found)
    for line, (number, words) in zip(found, expected, strict=True):
        assert line.strip().startswith(f"{number},") and words in line, (line, number, words)


@pytest.mark.parametrize("shares", ['"fair"', "{}", "{ a = 0, b = 0 }", "{ a = 1.5 }", '{ a = "3" }', "[1, 2]", "3", "true"])
def test_shares_that_cannot_be(tmp_path: Path, shares: str) -> None:
    found = faults(tmp_path, f"{GOOD}[parallel]\nshares = {shares}\n")
    assert found and all(line.strip().startswith("line 12, parallel.shares") for line in found), found


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("steps = 10", "", "exactly one of `epochs` and `steps`"),
        ("steps = 10", "steps = 10\nepochs = 1", "exactly one of `epochs` and `steps`"),
        ("learning_rate = 1e-3", "learning_rate = nan", "line 10"),
        ("learning_rate = 1e-3", "learning_rate = -1", "line 10"),
        ('train = "chats.jsonl"', 'train = ""', "line 4"),
        ('train = "chats.jsonl"', 'train = "hub:"', "a path relative to the recipe"),
        ('train = "chats.jsonl"', 'train = "a\\u0000b"', "cannot be used"),
        ('train = "chats.jsonl"', 'train = "chats.jsonl"\nconfig = "x"', '`config` is for data from the hub: train = "hub:org/name"'),
        (
            'train = "chats.jsonl"',
            'train = "hub:a/b"\neval = "e.jsonl"\neval_config = "x"',
            "`eval_config` is for data from the hub: eval =",
        ),
        ('train = "chats.jsonl"', 'train = "hub:a/b"\neval = "hub:a/b"\neval_split = "train"', "the same rows as the training"),
        ('train = "chats.jsonl"', 'train = "chats.jsonl"\nformat = "chat"\ntemplate = "none"', "a chat needs its chat template"),
        ('train = "chats.jsonl"', 'train = "chats.jsonl"\ntemplate = "no"', "line 5, data.template: got 'no'"),
        (
            'train = "chats.jsonl"',
            'train = "chats.jsonl"\ncolumns = { promt = "q" }',
            'line 5, data.columns.promt: unknown key "promt". Did you mean "prompt"?',
        ),
        ('train = "chats.jsonl"', 'train = "chats.jsonl"\ncolumns = { prompt = 3 }', "line 5, data.columns.prompt"),
        ('train = "chats.jsonl"', 'train = "chats.jsonl"\ncolumns = { prompt = "" }', "line 5, data.columns.prompt"),
        ('train = "chats.jsonl"', 'train = "chats.jsonl"\ncolumns = "q"', "line 5, data.columns"),
        ('train = "chats.jsonl"', 'train = "chats.jsonl"\ncolumns = { prompt = "q", text = "t" }', "a row is one of them"),
        ('train = "chats.jsonl"', 'train = "chats.jsonl"\ncolumns = { messages = "m", completion = "a" }', "a row is one of them"),
        ('train = "chats.jsonl"', 'train = "chats.jsonl"\ncolumns = { prompt = "q", completion = "q" }', "names q twice"),
        (
            'train = "chats.jsonl"',
            'train = "chats.jsonl"\ncolumns = { prompt = "q" }\nformat = "text"',
            'the columns of format = "prompt-completion"',
        ),
        ('train = "chats.jsonl"', 'train = "chats.jsonl"\ncolumns = { text = "a" }\ntext_column = "b"', "different columns of text"),
        (
            'train = "chats.jsonl"',
            'train = "chats.jsonl"\ncolumns = { messages = "m" }\ntemplate = "none"',
            "a chat needs its chat template",
        ),
        ('name = "/models/tiny"', 'name = "./tiny"', "a hub id like org/name"),
        ('kind = "lora"', 'kind = "lora"\nalpha = inf', "finite"),
        ('kind = "lora"', 'kind = "lora"\ntargets = [1]', "line 7"),
        ('kind = "lora"', 'kind = "lora"\nbase = "8bits"', "line 7, method.base: got '8bits'"),
        ('kind = "lora"', 'kind = "qlora"\nbase = "8bit"', '"qlora" holds its base in 4 bits; set `kind` = "lora"'),
        ('kind = "lora"', 'kind = "full"\nbase = "8bit"', '"full" trains its weights in 32 bits; set `kind` = "lora"'),
        ('kind = "lora"', 'kind = "lora"\nbase = "8bit"\nbackend = "unsloth"', "does not work with Unsloth"),
        ('kind = "lora"', 'kind = "lora"\ntargets = ["q_proj", "lm_head"]\nbackend = "unsloth"', "which no merge puts into the base"),
        ("steps = 10", "steps = " + "9" * 401, "line 9, train.steps: this number is too large"),
        ("[model]", "[checkpoint]\nkeep = 9000000000\n[model]", "line 2, checkpoint.keep"),
        ("[model]", "[recovery]\nlog_policies = [1]\n[model]", "line 2, recovery.log_policies.#1: got 1; allowed: a section of keys"),
        ("[model]", "[recovery]\nlog_policies = 1\n[model]", "allowed: a list"),
        ("[model]", f"[[recovery.log_policies]]\npattern = 'a{{{'9' * 20}}}'\naction = 'stop'\n[model]", "a regular expression"),
        ("[model]", f"[[recovery.log_policies]]\npattern = '{'(' * 5000}{')' * 5000}'\naction = 'stop'\n[model]", "a regular expression"),
        ("steps = 10", 'steps = 10\nlr_scale = "linear"', "`lr_scale` needs `reference_batch`"),
        ("steps = 10", "steps = 10\nreference_batch = 8", "`reference_batch` does nothing without `lr_scale`"),
        ("steps = 10", 'steps = 10\nlr_scale = "sqr"\nreference_batch = 8', "line 10, train.lr_scale: got"),
        ("steps = 10", 'steps = 10\nlr_scale = "sqrt"\nreference_batch = 0', "line 11, train.reference_batch"),
        ("[model]", "[parallel]\nbucket_mb = 0\n[model]", "more than 0"),
        ("[model]", '[parallel]\nbucket_mb = "small"\n[model]', "line 2, parallel.bucket_mb: got 'small'"),
        ("[model]", "[parallel]\nbucket_mb = true\n[model]", "line 2, parallel.bucket_mb"),
        ("[model]", '[parallel]\ncompress = "bf61"\n[model]', "line 2, parallel.compress"),
        ("[model]", "[Model]", 'Did you mean "model"?'),
    ],
)
def test_a_value_that_cannot_be(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in GOOD
    assert any(words in line for line in faults(tmp_path, GOOD.replace(old, new)))


def test_a_number_that_python_does_not_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not valid TOML"):
        load(tmp_path, GOOD.replace("steps = 10", "steps = " + "9" * 4500))


def test_what_the_planner_refuses_has_its_line(tmp_path: Path) -> None:
    load(tmp_path, GOOD + "[recovery]\nmin_nodes = 7\n")
    (file,) = tmp_path.iterdir()
    assert in_file("recipe, [recovery] min_nodes", file) == f"{file}, line 12, [recovery] min_nodes"
    assert in_file("recipe, [parallel] shares", file) == f"{file}, [parallel] shares"
    assert in_file("node tower", file) == "node tower"


def test_worker_or_script(tmp_path: Path) -> None:
    assert "missing [model], [data], [method], [train]" in faults(tmp_path, "")[0]
    assert "has its own training" in faults(tmp_path, GOOD + '[script]\npath = "train.py"\n')[0]
    assert load(tmp_path, '[script]\npath = "train.py"\nargs = ["$(touch pwned)"]\n').script


def test_the_law_hash_names_the_training_and_nothing_else(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        return load(tmp_path, text).law_hash(("train:abc",))

    same = [GOOD, GOOD + "[parallel]\nshares = { a = 12 }\nmicro_batch = 2\n[checkpoint]\nkeep = 1\n[recovery]\nmin_nodes = 2\n"]
    assert len({digest(text) for text in same}) == 1
    others = [
        ('kind = "lora"', 'kind = "lora"\nbase = "8bit"'),
        ('"chats.jsonl"', '"chats.jsonl"\ncolumns = { prompt = "ask" }'),
        ("12", "13"),
        ("1e-3", "2e-3"),
        ("steps = 10", "steps = 11"),
        ('"lora"', '"full"'),
        ("/models/tiny", "/models/small"),
    ]
    assert len({digest(GOOD.replace(old, new)) for old, new in others} | {digest(GOOD)}) == len(others) + 1
    assert load(tmp_path, GOOD).law_hash(("train:other",)) != digest(GOOD)


def test_a_value_is_shown_as_toml_spells_it(tmp_path: Path) -> None:
    (line,) = faults(tmp_path, GOOD.replace("steps = 10", "steps = true"))
    assert "train.steps: got true; allowed: a whole number" in line


@pytest.mark.parametrize("key", ["keep_best = true", "early_stopping = 3"])
def test_what_chooses_by_held_out_rows_needs_them(tmp_path: Path, key: str) -> None:
    text = GOOD.replace("steps = 10", f"steps = 10\n{key}")
    assert "set [data] eval or eval_fraction" in faults(tmp_path, text)[0]
    text = text.replace('train = "chats.jsonl"', 'train = "chats.jsonl"\neval_fraction = 0.1')
    assert "set [tracking] eval_every_steps" in faults(tmp_path, text)[0]
    assert load(tmp_path, text + "[tracking]\neval_every_steps = 5\n").train


def test_data_of_the_hub_has_its_configuration_split_and_revision(tmp_path: Path) -> None:
    def hub(text: str) -> list[tuple[str | None, ...] | None]:
        data = load(tmp_path, GOOD.replace('train = "chats.jsonl"', text)).data
        assert data is not None
        return [named and (named.path, named.config, named.split, named.revision) for named in map(data.hub, ("train", "eval"))]

    assert hub('train = "chats.jsonl"') == [None, None]
    same = 'train = "hub:a/b"\nconfig = "two"\nrevision = "v1"\neval = "hub:a/b"'
    assert hub(same) == [("a/b", "two", "train", "v1"), ("a/b", "two", "validation", "v1")]
    other = 'train = "hub:a/b"\nconfig = "two"\nrevision = "v1"\neval = "hub:a/c"\neval_split = "test"\neval_config = "x"'
    assert hub(other)[1] == ("a/c", "x", "test", None), "a revision of one data set is none of another"
    assert hub(f'{other}\neval_revision = "v2"')[1] == ("a/c", "x", "test", "v2")
    assert hub('train = "chats.jsonl"\neval = "hub:a/b"\neval_revision = "v2"') == [None, ("a/b", None, "validation", "v2")]


def test_lines_of_keys() -> None:
    text = '# head\n[a]\nx = 1\n[[nodes]]\nname = "n"\n\n[[nodes]]\n"odd key" = 1\ny.z = 2\n'
    assert tomllib.loads(text)
    lines = key_lines(text)
    assert line_of(lines, ("a", "x")) == 3
    assert line_of(lines, ("nodes", 0, "name")) == 5
    assert line_of(lines, ("nodes", 1, "odd key")) == 8
    assert line_of(lines, ("nodes", 1, "y", "z")) == 9
    assert line_of(lines, ("nodes", 1, "nothing")) == 7, "the nearest parent"
    assert line_of(lines, ("nowhere",)) is None


def test_a_file_without_end_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="far too large"):
        load_recipe(Path("/dev/zero"))


SCRIPT = '[script]\npath = "train.py"\nargs = ["--x"]\n'
SECTIONS = ["model", "data", "method", "train", "objective", "parallel", "checkpoint", "recovery", "tracking", "environment", "script"]


@pytest.mark.parametrize(
    ("text", "recorded"),
    [(GOOD, "78fb5074e90d6163"), (SCRIPT, "255d0732e4356958"), (f'{SCRIPT}[environment]\nLR = "1"\n', "2ce016465f1d0281")],
    ids=["training", "script", "script with environment"],
)
def test_runs_of_earlier_versions_keep_their_fingerprint(tmp_path: Path, text: str, recorded: str) -> None:
    assert load(tmp_path, text).law_hash(("train:abc",)) == recorded


@pytest.mark.parametrize(("text", "kind"), [(GOOD, TrainRecipe), (SCRIPT, ScriptRecipe)], ids=["training", "script"])
def test_a_recipe_is_one_of_two_kinds_and_run_json_holds_every_section(tmp_path: Path, text: str, kind: type) -> None:
    recipe = load(tmp_path, text)
    assert type(recipe) is kind
    written = recipe.model_dump(mode="json")
    assert sorted(written) == sorted(SECTIONS)
    assert parse_recipe(written, strict=False) == recipe


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (GOOD.replace('"chats.jsonl"', '"~data/x"'), "line 4, data.train"),
        (GOOD.replace('tiny"\n', 'tiny"\nadapter = "~data/x"\n'), "line 3, model.adapter"),
        ('[script]\npath = "~data/x"\n', "line 2, script.path"),
        ('[script]\npath = "train.py"\nfiles = ["a.py", "~data/x"]\n', "line 3, script.files.#2"),
    ],
)
def test_a_home_without_its_slash_is_a_fault_of_the_recipe(tmp_path: Path, text: str, place: str) -> None:
    words = 'this machine has no account "data"; a file of your home begins with ~/: "~/data/x"'
    assert faults(tmp_path, text) == [f"  {place}: {words}"]
