"""Rows with two answers: what becomes of them, and which edit a row gets that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from homelab.shared.recipe import Objective
from homelab.worker.data import pair_batches
from homelab.worker.data.batches import Form
from homelab.worker.data.encoding import Encoder
from homelab.worker.data.readers import Record
from homelab.worker.data.rows import Row
from homelab.worker.errors import WorkerError
from homelab.worker.tools import data_sample

SETTINGS = {"format": "preference", "completion_only": True, "template": "auto"}
ASKED, GOOD, BAD = (
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello there!"},
    {"role": "assistant", "content": "No."},
)


def encode(tokenizer: Any, rows: list[dict[str, Any]], seq_len: int = 256, **settings: Any) -> tuple[list[Row], list[str]]:
    notes: list[str] = []
    encoder = Encoder(tokenizer, SETTINGS | settings, seq_len, notes.append)
    return encoder.encode([Record(place, f"pairs, line {place + 1}", row) for place, row in enumerate(rows)], "train"), notes


def learned(tokenizer: Any, row: Row) -> list[str]:
    return [
        tokenizer.decode([token for token, counts in zip(side.tokens, side.trained, strict=True) if counts])
        for side in pair_batches.answers([row])
    ]


FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Hi?", "chosen": "Hello there!", "rejected": "No."},
    "a question": {"question": "Hi?", "chosen": "Hello there!", "rejected": "No.", "id": 3},
    "messages": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "whole conversations": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "whole conversations beside their prompt": {"prompt": "Hi?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "conversations as JSON": {"chosen": '[{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello there!"}]', "rejected": [ASKED, BAD]},
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_the_same_pair(tokenizer: Any, name: str) -> None:
    (row,), _ = encode(tokenizer, [FORMS[name]])
    ((expected,), _) = encode(tokenizer, [FORMS["messages"]])
    assert (row.tokens, row.trained, row.starts, row.sources) == (expected.tokens, expected.trained, expected.starts, (0,))
    assert ["Hello" in said for said in learned(tokenizer, row)] == [True, False]
    assert pair_batches.counts(row)


@pytest.mark.parametrize("answer", ['[{"name": "weather", "arguments": {}}]', "[ 1, 2 ]", "[]", '[{"role": "user"'])
def test_an_answer_that_is_a_json_list_is_a_text(tokenizer: Any, answer: str) -> None:
    ((row,), _) = encode(tokenizer, [{"prompt": "Hi?", "chosen": answer, "rejected": "no"}])
    assert pair_batches.counts(row) and answer in learned(tokenizer, row)[0]


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        ({"chosen": "a", "rejected": "b"}, "no prompt", '"prompt"'),
        ({"prompt": "a", "chosen": "b"}, 'no "rejected"', "[objective]"),
        ({"text": "a"}, 'no "chosen"', "remove [objective]"),
        ({"chosen": [ASKED, GOOD], "rejected": [BAD, GOOD]}, "do not begin with the same prompt", "same messages"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "do not begin with the same prompt", "same messages"),
        ({"chosen": [], "rejected": [ASKED, BAD]}, "do not begin with the same prompt", "same messages"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, '"chosen" must be text', "chosen"),
        ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [{"role": "assistant"}]}, "content", "content"),
    ],
)
def test_a_row_that_is_no_pair_has_an_edit(tokenizer: Any, row: dict[str, Any], message: str, hint: str) -> None:
    for asked in (None, tokenizer):
        figures = data_sample._of_all(
            [Record(0, "pairs, line 1", row)], {"previews": 1, "path": "pairs", "shown": "pairs"}, SETTINGS, 64, asked, bad := []
        )
        assert bad and message in bad[0]["message"] and hint in bad[0]["hint"], (figures, bad)
    with pytest.raises(WorkerError) as caught:
        encode(tokenizer, [row])
    assert message in caught.value.message and hint in caught.value.hint and caught.value.where.startswith("pairs, line 1")


def test_a_pair_is_learned_whole_or_not_at_all(tokenizer: Any) -> None:
    short = FORMS["texts"]
    long = {"prompt": "Hi?", "chosen": "Hello there! " * 20, "rejected": "No."}
    ((whole,), _) = encode(tokenizer, [short])
    rows, notes = encode(tokenizer, [short, long, {**short, "chosen": short["rejected"]}], len(whole.tokens))
    assert [pair_batches.counts(row) for row in rows] == [True, False, True]
    assert max(len(row.tokens) for row in rows) <= len(whole.tokens) + len(whole.tokens) // 2
    assert any("1 of 3 pairs are longer than seq_len" in note for note in notes)
    silent, _ = encode(tokenizer, [{**short, "rejected": ""}], template="none")
    assert [pair_batches.counts(row) for row in silent] == [True], "the end alone is an answer"
    assert any("both answers of 1 of 3 pairs are the same" in note for note in notes)


@pytest.mark.parametrize("kind", ["dpo", "orpo"])
@pytest.mark.parametrize("joined", [True, False])
def test_each_token_with_a_loss_knows_its_answer(tokenizer: Any, kind: Any, joined: bool) -> None:
    rows, _ = encode(tokenizer, [FORMS["texts"], {"prompt": "Say more?", "chosen": "x", "rejected": "a longer answer than the other one"}])
    form = Form(0, joined, True, Objective(kind))
    batch = form.batch(rows, packed=False, learned=form.learned(rows))
    assert len(batch["sides"]) == len(batch["labelled"]) == int((batch["labels"] != -100).sum())
    flat = batch["input_ids"].reshape(-1)
    for place, side in enumerate(pair_batches.answers(rows)):
        own = [int(flat[position + 1]) for position, owner in zip(batch["labelled"], batch["sides"], strict=True) if owner == place]
        assert own == [token for token, counts in zip(side.tokens, side.trained, strict=True) if counts]
    prompts = int((batch["sides"] == 4).sum())
    better = [pair_batches.answers(rows)[place] for place in (0, 2)]
    assert prompts == (sum(len(side.tokens) - 1 - side.loss_tokens for side in better) if kind == "orpo" else 0)
    assert form.learned(rows) == (sum(len(side.tokens) - 1 for side in better) if kind == "orpo" else 1)
    stand_in = form.stand_in(packed=False)
    assert form.counted(stand_in) == 0 and len(stand_in["sides"]) == 0


def test_data_that_nobody_asked_to_learn_pairs_of_says_that_it_has_some(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    settings = SETTINGS | {"format": "auto"}
    asked = {"train": {"path": str(file), "shown": "pairs.jsonl", "whole": True}}
    (found,) = data_sample.look({"files": asked, "data": settings, "seq_len": 64}, None).values()
    assert found["form"] == "preference" and 'kind = "dpo"' in found["rows_bad"][0]["hint"]


def test_pairs_that_do_not_fit_are_seen_before_the_start(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": "b", "rejected": "' + "long " * 60 + '"}\n')
    ((short,), _) = encode(tokenizer, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    asked = {"train": {"path": str(file), "shown": "pairs.jsonl", "whole": True, "previews": 2}}
    for room, silent in ((len(short.tokens), 1), (len(short.tokens) - 1, 2), (4096, 0)):
        (found,) = data_sample.look({"files": asked, "data": SETTINGS, "seq_len": room}, tokenizer).values()
        assert (found["form"], found["rows_silent"], found["tokens_sampled"]) == ("preference", silent, 2)
    texts = found["previews"][0]["texts"]
    assert (
        texts[0].startswith("[better]\n")
        and any("[other]\n" in text for text in texts[::2])
        and [text[:1] for text in texts[1::2]] == ["b", "c"]
    )


def test_what_the_passes_have_shown_is_summed_over_pairs_that_count() -> None:
    import torch

    from homelab.worker.model.pair_loss import PairFigures

    figures = PairFigures()
    figures.add(torch.tensor([1.0, -2.0, 5.0]), torch.tensor([1.0, 1.0, 0.0]), torch.tensor([3.0, 4.0, 9.0]))
    figures.add(torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([-1.0]))
    assert figures.take() == (-0.5, 2.0, 6.0)
    assert figures.take() == (0.0, 0.0, 0.0), "each step anew"
