"""`homelab new` from the rows to the file, without a node: every form of data, model and cluster gives a recipe that fits, or says why not."""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from homelab.cli import row_preview
from homelab.controller.attempt import inputs, planner
from homelab.controller.base.errors import InputError
from homelab.controller.config.cluster import Cluster, Gpu, Node
from homelab.controller.config.load import load_recipe
from homelab.controller.features.new import data_look, new_recipe, training_choice
from homelab.controller.features.new.training_choice import Attempt, Seen, Wish
from homelab.controller.planning.render import answer
from tests import builders
from tests.builders import address_of

MODEL = os.environ.get("HOMELAB_MODEL", "")
needs_model = pytest.mark.skipif(not MODEL, reason="HOMELAB_MODEL names no model")
WORDS = "the quick brown fox jumps over the lazy dog and then goes home to sleep until the morning comes"
CHINESE = "\u6211\u4eec\u7684\u5bb6\u91cc\u6709\u4e09\u53f0\u7535\u8111\uff0c\u5b83\u4eec\u4e00\u8d77\u8bad\u7ec3"


def no_say(text: str) -> None:
    """Nobody listens."""


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def tools(number: int) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": number}}}
    turns = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"messages": [*turns, {"role": "tool", "content": "seen"}, {"role": "assistant", "content": "I have seen it."}]}


def rows(count: int, row: Callable[[int], dict[str, Any]]) -> Iterable[str]:
    return [json.dumps(row(number)) for number in range(count)]


# name -> (file, its lines): forms and sizes
DATA: dict[str, tuple[str, Iterable[str]]] = {
    "chats": ("chats.jsonl", rows(400, lambda n: chat(f"{WORDS} {n}?", f"{n} {WORDS}"))),
    "three rows": ("three.jsonl", rows(3, lambda n: chat(f"{n}?", WORDS))),
    "one long row": ("long.jsonl", rows(50, lambda n: chat("Tell", WORDS * (80 if n == 7 else 1)))),
    "ShareGPT": ("share.jsonl", rows(90, lambda n: {"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": WORDS}]})),
    "Alpaca": ("alpaca.jsonl", rows(1200, lambda n: {"instruction": f"{n}?", "input": "", "output": WORDS})),
    "pairs": ("pairs.jsonl", rows(700, lambda n: {"prompt": f"{n}:", "completion": WORDS})),
    "text": ("text.jsonl", rows(300, lambda n: {"text": f"{n} {WORDS}"})),
    "tool calls": ("tools.jsonl", rows(60, tools)),
    "forty columns": ("wide.jsonl", rows(40, lambda n: {"question": f"{n}?", "answer": WORDS} | {f"about_{i}": i for i in range(38)})),
    "no spaces": ("chinese.jsonl", rows(150, lambda n: chat(f"{CHINESE}{n}", CHINESE * 4))),
    "paragraphs": ("story.txt", [f"{number} {WORDS}\n" for number in range(80)]),
    "table": ("table.csv", ()),
    "preferences": ("preferences.jsonl", rows(500, lambda n: {"prompt": f"{n}?", "chosen": WORDS, "rejected": f"no {n}"})),
}  # fmt: skip
MODELS = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-3B-Instruct",
    "Qwen/Qwen3-8B",
    "google/gemma-2-2b-it",
)


def machine(name: str, *cards: tuple[str, float]) -> Node:
    return Node(name=name, host=address_of(name), gpus=tuple(Gpu(model=model, vram_gb=size) for model, size in cards))


CLUSTERS = {
    "one small card": Cluster(nodes=(machine("mini", ("RTX 4060", 8.0)),)),
    "three unequal cards": Cluster(nodes=(machine("tower", ("RTX 3090", 24.0)), machine("laptop", ("RTX 3060", 12.0)), machine("old", ("RTX 3070", 8.0)))),
    "two equal cards": Cluster(nodes=(machine("a", ("RTX 4090", 24.0)), machine("b", ("RTX 4090", 24.0)))),
    "five machines": Cluster(nodes=tuple(machine(f"n{number}", ("RTX 3080", 10.0)) for number in range(5))),
}  # fmt: skip


def write(folder: Path, name: str) -> Path:
    file, lines = DATA[name]
    path = folder / file
    if name == "table":
        with path.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerows([("prompt", "completion"), *((f"{number}, or?", WORDS) for number in range(200))])
    else:
        path.write_text("\n".join(lines) + "\n")
    return path


# In the quick form every second form of data meets one model.
QUICK = {(name, MODELS[number % len(MODELS)]) for number, name in enumerate(DATA) if number % 2 == 0}
CASES = [
    pytest.param(name, model, marks=[] if (name, model) in QUICK else pytest.mark.thorough, id=f"{name}, {model}")
    for name in DATA for model in MODELS
]  # fmt: skip


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], new_recipe.NewRecipe]:
    """Each form of data, written, looked at and decided for once."""

    @functools.cache
    def look(name: str) -> new_recipe.NewRecipe:
        folder = tmp_path_factory.mktemp("data")
        return new_recipe.make(
            Wish(str(write(folder, name)), MODELS[0], folder / "r.toml", offline=True), CLUSTERS["one small card"], no_say
        )

    return look


def assert_launched_as_planned(chosen: Attempt, seen: Seen) -> None:
    """`homelab plan` of the written recipe, on the nodes that `new` names, is the plan that `new` shows, and advises no other nodes."""
    assert chosen.plan is not None
    named = chosen.nodes or tuple(node.name for node in seen.inputs.cluster.nodes)
    plan = planner.settled(dataclasses.replace(seen.inputs, cluster=seen.inputs.cluster.only(named), recipe=chosen.recipe))[1]
    assert tuple(node.name for node in plan.nodes) == named
    assert plan.fewer is None and not any("--nodes" in line for line in (plan.time.verdict if plan.time else ())), plan.fewer
    assert not any("--nodes" in line for line in plan.warnings), plan.warnings
    assert (plan.strategy, plan.precision, plan.ranks) == (chosen.plan.strategy, chosen.plan.precision, chosen.plan.ranks)
    assert {*named, *chosen.left_out} == {node.name for node in seen.inputs.cluster.nodes} and bool(chosen.left_out) is bool(chosen.nodes)


@pytest.mark.parametrize(("name", "model"), CASES)
def test_every_form_of_data_fits_every_model_on_every_cluster(
    name: str, model: str, looked_at: Callable[[str], new_recipe.NewRecipe], tmp_path: Path
) -> None:
    first = looked_at(name)
    for kind, cluster in CLUSTERS.items():
        wish = Wish("x.jsonl", model, tmp_path / "other.toml", offline=True)
        seen = new_recipe.with_model(first.seen.on(cluster), model, wish)
        chosen = training_choice.choose(wish, model, seen, first.rows)
        assert chosen.fits, (model, kind, chosen.error)
        assert_launched_as_planned(chosen, seen)
        assert chosen.recipe.train.seq_len >= first.rows.longest or "cut" in str([one.reason for one in chosen.decisions])


@pytest.mark.parametrize("name", ["chats", "table"])
def test_what_is_written_is_what_was_decided_and_stays(name: str, tmp_path: Path) -> None:
    wish = Wish(str(write(tmp_path, name)), MODELS[0], tmp_path / "r.toml", offline=True)
    first = new_recipe.make(wish, CLUSTERS["one small card"], no_say)
    assert load_recipe(tmp_path / "r.toml") == first.chosen.recipe
    assert not new_recipe.make(wish, CLUSTERS["one small card"], no_say).is_changed


def test_the_base_is_held_in_4_bits_only_if_that_helps(tmp_path: Path) -> None:
    path = write(tmp_path, "chats")
    kinds = {
        (model, kind): new_recipe.make(Wish(str(path), model, tmp_path / f"{number}{kind[:3]}.toml", offline=True), CLUSTERS[kind], no_say).chosen.recipe.method.kind
        for number, model in enumerate(("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B")) for kind in ("one small card", "two equal cards")
    }  # fmt: skip
    assert kinds == {
        ("Qwen/Qwen3-0.6B", "one small card"): "lora", ("Qwen/Qwen3-0.6B", "two equal cards"): "lora",
        ("Qwen/Qwen3-8B", "one small card"): "qlora", ("Qwen/Qwen3-8B", "two equal cards"): "lora",
    }  # fmt: skip


def test_a_model_that_has_no_room_is_written_and_said(tmp_path: Path) -> None:
    path = write(tmp_path, "chats")
    tiny = builders.cluster(["tower"], nodes={"tower": {"gpus": [{"model": "RTX 3050", "vram_gb": 2}]}})
    made = new_recipe.make(Wish(str(path), "Qwen/Qwen3-32B", tmp_path / "r.toml", offline=True), tiny, no_say)
    assert not made.chosen.fits and (tmp_path / "r.toml").is_file()


def test_a_model_whose_layers_must_be_streamed_keeps_whole_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "chats")
    made = new_recipe.make(Wish(str(path), "Qwen/Qwen3-32B", tmp_path / "r.toml", offline=True), CLUSTERS["one small card"], no_say)
    assert made.chosen.fits and not made.chosen.is_resident
    assert made.chosen.recipe.method.kind == "qlora" and made.chosen.recipe.train.gradient_checkpointing


def test_without_a_model_the_largest_that_fits_is_proposed(tmp_path: Path) -> None:
    path = write(tmp_path, "chats")
    names = {
        kind: new_recipe.make(Wish(str(path), "", tmp_path / f"{kind[:3]}.toml", offline=True), cluster, no_say).chosen.recipe.model.name
        for kind, cluster in CLUSTERS.items()
    }
    sizes = [new_recipe.PROPOSED.index(names[kind]) for kind in ("two equal cards", "one small card")]
    assert sizes[0] < sizes[1]


def test_no_cluster_is_one_card_and_said(tmp_path: Path) -> None:
    made = new_recipe.make(Wish(str(write(tmp_path, "chats")), MODELS[1], tmp_path / "r.toml"), None, no_say)
    assert not made.seen.has_cluster and "homelab init" in made.seen.notes[0] and made.chosen.fits


def test_a_file_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    mine = tmp_path / "r.toml"
    mine.write_text("[model]\nname = 'a/b'\n")
    with pytest.raises(InputError, match="has not written it"):
        new_recipe.make(Wish(str(write(tmp_path, "chats")), MODELS[1], mine), None, no_say)
    assert mine.read_text() == "[model]\nname = 'a/b'\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty"),
        ("nonsense\n", "not a JSON object"),
        ('{"chosen": "a", "rejected": "b"}\n', "no prompt"),
        ('{"a": 1}\n', "the row has"),
    ],
)
def test_rows_that_no_training_reads_are_refused_and_nothing_is_written(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        new_recipe.make(Wish(str(path), MODELS[1], tmp_path / "r.toml"), None, no_say)
    assert said in str(caught.value), caught.value
    assert caught.value.hint and not (tmp_path / "r.toml").exists()


def test_a_folder_and_a_file_that_is_not_there_name_what_is(tmp_path: Path) -> None:
    write(tmp_path, "chats")
    for wrong in (tmp_path, tmp_path / "chat.jsonl", tmp_path / "none" / "x.jsonl"):
        with pytest.raises(InputError) as caught:
            new_recipe.make(Wish(str(wrong), MODELS[1], tmp_path / "r.toml"), None, no_say)
        assert "chats.jsonl" in str(caught.value.hint) or "hub:org/name" in str(caught.value.hint)


def test_data_behind_a_link_is_called_by_the_name_of_the_link(tmp_path: Path) -> None:
    """The cache of the hub and DVC call the file itself by its digest."""
    for folder in ("blobs", "data", "linked"):
        (tmp_path / folder).mkdir()
    blob, link = tmp_path / "blobs" / "4f2a", tmp_path / "data" / "train.jsonl"
    write(tmp_path, "three rows").rename(blob)
    link.symlink_to("../blobs/4f2a")
    file = data_look.of_file(link, "", 0).files["train"]
    assert (file.rows_read, file.read_as) == (3, "chat"), file
    made = new_recipe.make(Wish(str(link), MODELS[1], tmp_path / "linked" / "r.toml", offline=True), None, no_say)
    assert made.chosen.recipe.data.train == "../data/train.jsonl" and made.seen.file is not None
    (item,) = made.seen.items
    assert (item.name, item.local) == ("train.jsonl", link.parent.resolve() / "train.jsonl")
    nameless = tmp_path / "data" / "latest"
    nameless.symlink_to("train.jsonl")
    link.unlink()
    blob.rename(link)
    assert inputs.of_recipe(data_look.draft("latest", "a/b"), nameless, folder=nameless.parent)[0].name == "train.jsonl"


def table_of(folder: Path, count: int) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([chat(f"{number}?", WORDS) for number in range(count)]), folder / "chats.parquet")
    return folder / "chats.parquet"


def test_a_large_parquet_file_is_read_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_look, "SENT_BYTES", 100)
    path = table_of(tmp_path, 300)
    file = data_look.of_file(path, "", 0).files["train"]
    assert (file.rows_read, file.whole, file.unread) == (300, True, None), file
    made = new_recipe.make(Wish(str(path), MODELS[1], tmp_path / "r.toml", offline=True), None, no_say)
    assert made.rows.count == 300 and not any("decided for" in note and "rows" in note for note in made.seen.notes), made.seen.notes


def test_parquet_without_its_library_is_said_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, find = table_of(tmp_path, 3), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    file = data_look.of_file(path, "", 0).files["train"]
    assert "-m pip install pyarrow" in (file.unread or "") and row_preview.summary(path, file).endswith("-m pip install pyarrow")
    made = new_recipe.make(Wish(str(path), MODELS[1], tmp_path / "r.toml", offline=True), None, no_say)
    (note,) = [note for note in made.seen.notes if "decided for" in note and "rows" in note]
    assert "-m pip install pyarrow" in note and "when a node can read them" not in note


@needs_model
def test_with_the_tokenizer_here_tokens_are_counted_and_rows_shown_as_they_are_learned(tmp_path: Path) -> None:
    made = new_recipe.make(Wish(str(write(tmp_path, "chats")), MODEL, tmp_path / "r.toml"), None, no_say)
    assert made.rows.is_counted and made.seen.file is not None
    preview = made.seen.file.previews[0]
    assert len(made.seen.file.previews) == 3 and preview.where.endswith("chats.jsonl, line 1")
    assert "user" in preview.texts[0] and preview.texts[1].strip().startswith("0 the quick")
    wide = new_recipe.make(Wish(str(write(tmp_path, "text")), MODEL, tmp_path / "t.toml"), None, no_say)
    assert wide.seen.file is not None and wide.seen.file.previews[0].texts[1].startswith("0 the quick")


@pytest.mark.thorough
@needs_model
def test_homelab_data_says_what_is_learned(tmp_path: Path) -> None:
    file = data_look.of_file(write(tmp_path, "Alpaca"), MODEL, 2).files["train"]
    assert file.rows_read == 1200 and file.read_as.startswith("Alpaca") and len(file.previews) == 2
    assert 0 < file.loss_tokens < file.sum_tokens
    without = data_look.of_file(write(tmp_path, "Alpaca"), "", 2).files["train"]
    assert without.rows_read == 1200 and not without.previews


def test_the_verdict_is_that_on_the_file_with_its_edits(tmp_path: Path) -> None:
    wish = Wish(str(write(tmp_path, "chats")), "Qwen/Qwen3-8B", tmp_path / "r.toml", offline=True)
    assert new_recipe.make(wish, CLUSTERS["one small card"], no_say).verdict.runs
    edited = re.sub(r"(?m)^seq_len = \d+", "seq_len = 32768", wish.output.read_text())
    wish.output.write_text(edited)
    made = new_recipe.make(wish, CLUSTERS["one small card"], no_say)
    assert made.chosen.recipe.train.seq_len == 32768 and made.verdict.runs is False and "plan" in made.following
    wish.output.write_text(re.sub(r"(?m)^seq_len = \d+", "seq_len = 1", edited))
    with pytest.raises(InputError, match="seq_len"):
        new_recipe.make(wish, CLUSTERS["one small card"], no_say)


def test_a_model_that_was_edited_is_the_one_that_is_decided_for(tmp_path: Path) -> None:
    wish = Wish(str(write(tmp_path, "chats")), "", tmp_path / "r.toml", offline=True)
    first = new_recipe.make(wish, CLUSTERS["one small card"], no_say).chosen.recipe
    wish.output.write_text(
        wish.output.read_text().replace(f'name = "{first.model.name}"', 'name = "HuggingFaceTB/SmolLM2-135M-Instruct"', 1)
    )
    again = new_recipe.make(wish, CLUSTERS["one small card"], no_say).chosen.recipe
    assert again.model.name == "HuggingFaceTB/SmolLM2-135M-Instruct" and again.train.learning_rate > first.train.learning_rate


def test_processors_alone_get_the_smallest_model_proposed(tmp_path: Path) -> None:
    cluster = Cluster(nodes=(machine("a"), machine("b")))
    made = new_recipe.make(Wish(str(write(tmp_path, "chats")), "", tmp_path / "r.toml", offline=True), cluster, no_say)
    assert made.chosen.recipe.model.name == new_recipe.PROPOSED[-1] and made.chosen.recipe.method.kind == "lora"
    assert made.chosen.plan is not None and answer.of(made.chosen.plan, made.verdict).startswith("It can run."), "nobody knows its memory"


def test_rows_that_nobody_could_count_are_said(tmp_path: Path) -> None:
    made = new_recipe.make(Wish("hub:org/rows", MODELS[1], tmp_path / "r.toml", offline=True), CLUSTERS["one small card"], no_say)
    assert "could not be looked at" in made.seen.notes[-1] and made.rows.count == training_choice.UNKNOWN_ROWS
    assert made.chosen.recipe.train.epochs == 3


def test_four_bits_have_the_true_reason(tmp_path: Path) -> None:
    wish = Wish(str(write(tmp_path, "chats")), "Qwen/Qwen3-8B", tmp_path / "r.toml", offline=True)
    made = new_recipe.make(wish, CLUSTERS["one small card"], no_say)
    assert next(one.reason for one in made.chosen.decisions if one.place == "method.kind") == training_choice._NO_ROOM_FOR_16_BITS


def test_rows_that_say_which_answer_is_better_are_learned_as_pairs(tmp_path: Path) -> None:
    made = new_recipe.make(
        Wish(str(write(tmp_path, "preferences")), MODELS[0], tmp_path / "r.toml", offline=True), CLUSTERS["one small card"], no_say
    )
    recipe = load_recipe(tmp_path / "r.toml")
    assert recipe.objective is not None and (recipe.objective.kind, recipe.objective.beta) == ("dpo", 0.1)
    assert recipe.data is not None and recipe.data.format == "preference", "so that all who read rows know what they look for"
    assert recipe.train is not None and recipe.train.learning_rate < 1e-4 and recipe.train.epochs is not None and recipe.train.epochs <= 3
    assert made.rows.words == "500 pairs" and "format" not in (tmp_path / "r.toml").read_text()
    chosen = new_recipe.make(
        Wish(str(write(tmp_path, "preferences")), MODELS[0], tmp_path / "s.toml", offline=True, columns={"prompt": "prompt", "completion": "chosen"}),
        CLUSTERS["one small card"], no_say,
    )  # fmt: skip
    assert chosen.chosen.recipe.objective is None, "a person may name one of the answers"


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"q": "a?", "good": "yes", "bad": "no"}, {"prompt": "q", "chosen": "good", "rejected": "bad"}),
        ({"frage": "a?", "chosen": "yes", "rejected": "no"}, {"prompt": "frage"}),
    ],
)
def test_pairs_in_columns_of_other_names_are_learned_as_pairs(row: dict[str, str], columns: dict[str, str], tmp_path: Path) -> None:
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(200)))
    new_recipe.make(Wish(str(data), MODELS[0], tmp_path / "r.toml", offline=True, columns=columns), CLUSTERS["one small card"], no_say)
    recipe = load_recipe(tmp_path / "r.toml")
    assert recipe.objective is not None and recipe.data is not None and recipe.data.columns is not None
    assert {name: column for name, column in vars(recipe.data.columns).items() if column} == columns


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "a?", "completion": "yes", "label": True}, {}),
        ({"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "yes"}], "label": False}, {}),
        ({"q": "a?", "said": "yes", "useful": 1}, {"prompt": "q", "completion": "said", "label": "useful"}),
    ],
)
def test_rows_that_say_whether_their_answer_is_good_are_judged(row: dict[str, Any], columns: dict[str, str], tmp_path: Path) -> None:
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(200)))
    made = new_recipe.make(
        Wish(str(data), MODELS[0], tmp_path / "r.toml", offline=True, columns=columns), CLUSTERS["one small card"], no_say
    )
    recipe = load_recipe(tmp_path / "r.toml")
    assert recipe.objective is not None and recipe.objective.kind == "kto" and recipe.data is not None and recipe.data.format == "labelled"
    assert made.rows.words == "200 answers" and recipe.train is not None and recipe.train.learning_rate < 1e-4


@pytest.mark.parametrize("label", ["spam", 1, "true", None])
def test_a_label_that_is_no_truth_is_not_learned(label: object, tmp_path: Path) -> None:
    """A number may be a class, and a word a topic: a person names such a column."""
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps({"prompt": "a?", "completion": "yes", "label": label}) + "\n" for _ in range(200)))
    made = new_recipe.make(Wish(str(data), MODELS[0], tmp_path / "r.toml", offline=True), CLUSTERS["one small card"], no_say)
    assert made.chosen.recipe.objective is None


def test_few_rows_get_a_command_that_tries_fewer_passes(tmp_path: Path) -> None:
    said = {}
    for name in ("three rows", "chats", "Alpaca", "preferences"):
        made = new_recipe.make(
            Wish(str(write(tmp_path, name)), MODELS[0], tmp_path / f"{name}.toml", offline=True), CLUSTERS["one small card"], no_say
        )
        assert made.chosen.recipe.train.epochs is not None
        said[name] = (made.chosen.recipe.train.epochs > 5, [str(note) for note in made.seen.notes if "homelab queue add" in note])
    assert [bool(notes) for _, notes in said.values()] == [is_many for is_many, _ in said.values()] == [True, True, False, False]
    assert f"homelab queue add '{tmp_path}/three rows.toml' --set train.epochs=2,8" in said["three rows"][1][0]


def test_a_home_without_its_slash_is_a_file_that_is_not_there() -> None:
    with pytest.raises(InputError, match="there is no such file"):
        data_look.refuse_no_file("~data/chats.jsonl")
