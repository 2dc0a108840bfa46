"""Rows and masks are those of TRL, for all of its chat templates: one turn, several, a system message, tools, tool calls, thoughts.

TRL is the yardstick here and nowhere else: what it trains with is what `SFTTrainer(assistant_only_loss=True)` tokenizes.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from homelab.worker.data import encoding, readers
from homelab.worker.data import template as template_module
from homelab.worker.data.rows import Row
from homelab.worker.errors import WorkerError

trl_utils = pytest.importorskip("trl.chat_template_utils")
pytestmark = pytest.mark.timeout(120)

FOLDER = Path(trl_utils.__file__).parent / "chat_templates"
ALL = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
MARKED = [family for family in ALL if trl_utils.has_generation_markers((FOLDER / f"{family}.jinja").read_text(encoding="utf-8"))]
FAMILIES = [family for family in ALL if family in MARKED or (FOLDER / f"{family}_training.jinja").exists()]
UNMARKED = [family for family in ALL if family not in FAMILIES]  # TRL cannot train on answers alone with these
SETTINGS = {"format": "auto", "completion_only": True, "packing": False, "split": "train", "text_column": "text", "eval_fraction": 0.0}
FUNCTION = {
    "name": "get_weather", "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "its name"}}, "required": ["city"]},
}  # fmt: skip
TOOLS = [{"type": "function", "function": FUNCTION}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls(arguments: Any = None, **more: Any) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": arguments or {"city": "Rome"}}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": text}


CASES: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [user("one"), says("two")]},
    "three turns": {"messages": [user("one"), says("two"), user("three é"), says("four"), user("five"), says(" six\nseven ")]},
    "system": {"messages": [{"role": "system", "content": "be kind"}, user("one"), says("two"), user("three"), says("four")]},
    "ends with a question": {"messages": [user("one"), says("two"), user("three")]},
    "thoughts in the text": {"messages": [user("one"), says("<think>\nfirst\n</think>\n\ntwo"), user("three"), says("<think>\nsecond\n</think>\n\nfour")]},
    "thoughts apart": {"messages": [user("one"), says("two", reasoning_content="first"), user("three"), says("four", reasoning_content="second")]},
    "tools": {"tools": TOOLS, "messages": [user("one"), says("two"), user("three"), says("four")]},
    "calls": {"tools": TOOLS, "messages": [user("one"), calls(), result("sunny"), says("it is"), user("and now?"), calls(), result("rain"), says("bad")]},
}  # fmt: skip


@pytest.fixture
def tokenizer_of(tokenizer: Any, tmp_path: Path) -> Any:
    """The tests' tokenizer with a family's template and the marks in it as tokens."""

    def of(family: str) -> Any:
        text = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
        own = type(tokenizer).from_pretrained(tokenizer.name_or_path)
        own.add_special_tokens(
            {"additional_special_tokens": sorted(set(re.findall(r"<[|｜][^<>|｜]{1,30}[|｜]>|</?[a-z_]+_of_[a-z]+>", text)))}
        )
        own.chat_template = text
        return own

    return of


def in_parts(case: dict[str, Any]) -> dict[str, Any]:
    """As templates of models with images want it; TRL leaves that to the processor."""
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in case["messages"]]
    return {**case, "messages": parts}


def of_trl(tokenizer: Any, case: dict[str, Any]) -> tuple[list[int], list[int]]:
    """(ids, mask) as TRL makes them. Raises whatever TRL and the template raise."""
    template = None if trl_utils.has_generation_markers(tokenizer.chat_template) else trl_utils.get_training_chat_template(tokenizer)
    made = tokenizer.apply_chat_template(
        case["messages"],
        chat_template=template,
        tools=case.get("tools"),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return list(made["input_ids"]), list(made["assistant_masks"])


def encoded(tokenizer: Any, row: dict[str, Any], **settings: Any) -> tuple[Row, list[str]]:
    notes: list[str] = []
    encoder = encoding.Encoder(tokenizer, SETTINGS | settings, 1 << 20, notes.append)
    return encoder.encode([readers.Record(0, "rows, line 1", row)], "train")[0], notes


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_masks_are_those_of_trl(tokenizer_of: Any, family: str, case: str) -> None:
    tokenizer = tokenizer_of(family)
    row = CASES[case]
    needs_parts = family in ("idefics3", "llava_next", "smolvlm")
    try:
        ids, mask = of_trl(tokenizer, in_parts(row) if needs_parts else row)
    except Exception:  # a template may refuse a system message
        with pytest.raises(WorkerError, match="the chat template refuses this row"):
            encoded(tokenizer, row)
        return
    own, _ = encoded(tokenizer, row)
    assert tokenizer.decode(list(own.tokens)) == tokenizer.decode(ids)
    assert list(own.tokens) == ids
    assert [0, *mask[1:]] == list(own.trained)
    assert own.loss_tokens or not any(mask)


def test_a_chat_without_trl_is_refused_and_no_guess_is_made(tokenizer_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tokens are learned must not depend on whether a package happens to be there. A template with marks of its own needs none."""
    tokenizer, marked = tokenizer_of("qwen3"), tokenizer_of("qwen3")
    marked.chat_template = (FOLDER / "qwen3_training.jinja").read_text(encoding="utf-8")
    for cached in (template_module._folder, template_module._names):
        cached.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    try:
        with pytest.raises(WorkerError, match="the package trl is not installed"):
            encoded(tokenizer, CASES["three turns"])
        assert encoded(marked, CASES["three turns"])[0].loss_tokens
    finally:
        template_module._folder.cache_clear()


def test_every_training_template_is_trls() -> None:
    for path in sorted(FOLDER.glob("*_training.jinja")):
        family = path.stem.removesuffix("_training")
        own = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
        name = template_module.training_name(own)
        assert name == family and template_module.training_template(name) == path.read_text(encoding="utf-8"), family


@pytest.mark.parametrize("family", UNMARKED)
def test_where_trl_has_no_training_template_every_turn_is_learned(tokenizer_of: Any, family: str) -> None:
    """Llama 3.1, Gemma 4: found by rendering."""
    tokenizer = tokenizer_of(family)
    for case, words in (("three turns", ("two", "four", "seven")), ("system", ("two", "four")), ("calls", ("Rome", "it is", "bad"))):
        row, notes = encoded(tokenizer, CASES[case])
        learned = tokenizer.decode([token for token, counts in zip(row.tokens, row.trained, strict=True) if counts])
        assert all(word in learned for word in words) and not any(word in learned for word in ("one", "three", "kind", "sunny")), (
            case,
            learned,
        )
        assert not any("rewrites" in note for note in notes)


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_are_learned_as_trl_has_them(tokenizer_of: Any, family: str) -> None:
    """What the assistant says in the completion, behind what the prompt and the whole have in common."""
    tokenizer = tokenizer_of(family)
    prompt, completion = [user("one"), says("two"), user("three")], [says("four")]
    as_given = in_parts if family in ("idefics3", "llava_next", "smolvlm") else dict
    ids, mask = of_trl(tokenizer, as_given({"messages": prompt + completion}))
    template = None if family in MARKED else trl_utils.get_training_chat_template(tokenizer)
    asked = tokenizer.apply_chat_template(
        as_given({"messages": prompt})["messages"], chat_template=template, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    common = next((place for place, (mine, its) in enumerate(zip(asked, ids, strict=False)) if mine != its), min(len(asked), len(ids)))
    row, _ = encoded(tokenizer, {"prompt": prompt, "completion": completion})
    assert list(row.tokens) == ids and list(row.trained) == [counts if place >= common else 0 for place, counts in enumerate(mask)]


@pytest.mark.parametrize("family", ["llama3", "qwen2_5"])
def test_with_loss_on_everything_the_models_own_template_is_used(tokenizer_of: Any, family: str) -> None:
    tokenizer = tokenizer_of(family)
    row, _ = encoded(tokenizer, CASES["system"], completion_only=False)
    assert list(row.tokens) == tokenizer.apply_chat_template(CASES["system"]["messages"], return_dict=True)["input_ids"] and all(
        row.trained[1:]
    )
