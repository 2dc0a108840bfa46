"""Answers with a label: what becomes of them, which edit a row gets that is none, and what each is compared with."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from homelab.shared.law.limits import Limits
from homelab.shared.law.speed import Speed
from homelab.shared.recipe import Objective
from homelab.worker.balancing.balancer import Balance
from homelab.worker.data import compared_answers, row_agreement, row_cache
from homelab.worker.data.batches import Form, StepBatches
from homelab.worker.data.encoding import Encoder
from homelab.worker.data.readers import Record
from homelab.worker.data.rows import EncodedData, Row
from homelab.worker.errors import WorkerError
from homelab.worker.objectives import losses
from homelab.worker.objectives.pair_answers import Answers

SETTINGS = {"format": "labelled", "completion_only": True, "template": "auto"}
ASKED, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello there!"}


def encode(tokenizer: Any, rows: list[dict[str, Any]], seq_len: int = 256, **settings: Any) -> tuple[list[Row], list[str]]:
    notes: list[str] = []
    encoder = Encoder(tokenizer, SETTINGS | settings, seq_len, notes.append)
    return encoder.encode([Record(place, f"answers, line {place + 1}", row) for place, row in enumerate(rows)], "train"), notes


FORMS: dict[str, tuple[dict[str, Any], bool]] = {
    "texts": ({"prompt": "Hi?", "completion": "Hello there!", "label": True}, True),
    "a number": ({"prompt": "Hi?", "completion": "Hello there!", "label": 0}, False),
    "a word of a CSV cell": ({"prompt": "Hi?", "completion": "Hello there!", "label": "False"}, False),
    "a question": ({"question": "Hi?", "answer": "Hello there!", "thumbs_up": True, "id": 3}, True),
    "messages": ({"prompt": [ASKED], "completion": [ANSWER], "label": True}, True),
    "a conversation": ({"messages": [ASKED, ANSWER], "label": False}, False),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello there!"}], "label": True}, True),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_the_same_answer(tokenizer: Any, name: str) -> None:
    given, is_good = FORMS[name]
    (row,), _ = encode(tokenizer, [given])
    ((expected,), _) = encode(tokenizer, [FORMS["messages"][0]])
    assert (row.tokens, row.trained, row.starts, row.good) == (expected.tokens, expected.trained, (0,), is_good)
    assert "Hello" in tokenizer.decode([token for token, counts in zip(row.tokens, row.trained, strict=True) if counts])


def test_only_the_last_answer_of_a_conversation_is_judged(tokenizer: Any) -> None:
    earlier = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    (row,), _ = encode(tokenizer, [{"messages": [*earlier, ASKED, ANSWER], "label": True}])
    learned = tokenizer.decode([token for token, counts in zip(row.tokens, row.trained, strict=True) if counts])
    assert "Hello" in learned and "Me." not in learned and "Me." in tokenizer.decode(row.tokens)


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        ({"prompt": "a", "completion": "b"}, 'no "label"', 'give each row "prompt", "completion" and "label"'),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, 'no "label"', 'set kind = "dpo"'),
        ({"text": "a", "label": True}, 'no "prompt"', "a labelled answer needs its question"),
        ({"prompt": "a", "completion": "b", "label": "perhaps"}, "true or false, here it is 'perhaps'", "write true for a good answer"),
        ({"prompt": "a", "completion": "b", "label": None}, "true or false, here it is 'None'", "write true for a good answer"),
        ({"prompt": "a", "completion": "b", "label": 5}, "true or false, here it is '5'", "write true for a good answer"),
        ({"messages": [ASKED], "label": True}, "does not end with an answer", "let the last message be the assistant's"),
    ],
)
def test_a_row_that_is_none_gets_the_edit(tokenizer: Any, row: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(WorkerError) as error:
        encode(tokenizer, [row])
    assert message in error.value.message and hint in error.value.hint and "answers, line 1" in error.value.where


def test_an_answer_that_is_too_long_teaches_nothing(tokenizer: Any) -> None:
    rows, notes = encode(tokenizer, [{"prompt": "a", "completion": text, "label": True} for text in ("b", "b " * 300)], seq_len=64)
    assert [any(row.trained) for row in rows] == [True, False] and len(rows[1].tokens) == 64
    assert any("1 of 2 answers are longer than seq_len 64" in note for note in notes)
    assert any("all answers are good" in note for note in notes)


def answers(count: int) -> list[Row]:
    return [Row(array("i", [place, 1000 + place, 2000 + place]), bytes([0, 1, 1]), (place,)) for place in range(count)]


def test_each_answer_is_compared_with_one_to_another_prompt_and_all_are_used_once() -> None:
    rows, again, others = answers(9), answers(9), answers(9)
    for part, seed in ((rows, 1), (again, 1), (others, 2)):
        compared_answers.fill_others(part, seed, 8)
    drawn = [row.other.tokens.tolist() for row in rows if row.other]
    assert [tokens[0] for tokens in drawn] == list(range(9)), "its own prompt"
    assert sorted(tokens[1] - 1000 for tokens in drawn) == list(range(9)), "each answer once"
    assert all(tokens[1] - 1000 != tokens[0] and tokens[2] == tokens[1] + 1000 for tokens in drawn)
    assert drawn == [row.other.tokens.tolist() for row in again if row.other], "the seed alone decides"
    assert drawn != [row.other.tokens.tolist() for row in others if row.other]


def test_rows_that_teach_nothing_are_nobodys_other_answer() -> None:
    rows = answers(3)
    rows[1].trained = bytes(3)
    compared_answers.fill_others(rows, 1, 2)
    found = [row.other for row in rows if row.other is not None]
    assert [other.tokens.tolist() for other in found] == [[0, 1002], [1, 1001], [2, 1000]], "cut at two tokens"
    assert [any(other.trained) for other in found] == [True, False, True]
    (alone,) = answers(1)
    compared_answers.fill_others([alone], 1, 8)
    assert alone.other is not None and alone.other.tokens == alone.tokens


def test_the_tensors_of_judged_answers() -> None:
    rows = answers(3)
    rows[0].good, rows[2].trained, rows[1].reference = False, bytes(3), (-4.0, -9.0)
    batch = Form(0, joined=True, labelled=True, objective=Objective("kto")).batch(rows, packed=False)
    assert batch["sides"].tolist() == [0, 0, 1, 1] and batch["labelled"].numel() == 4
    assert batch["good"].tolist() == [0, 1, 1] and batch["counting"].tolist() == [1, 1, 0]
    assert batch["reference"].tolist() == [0, -4, 0] and batch["answer_tokens"].tolist() == [2, 2, 1] and float(batch["baseline"]) == 0


def test_the_weights_say_how_much_each_kind_counts() -> None:
    answers = Answers(torch.tensor([-3.0, -8.0]), torch.tensor([2.0, 2.0]), torch.tensor([-5.0, -5.0]))
    good = torch.tensor([1.0, 0.0])
    plain, lead = losses.of_judged(answers, good, torch.tensor(1.0), Objective("kto"))
    weighed, _ = losses.of_judged(answers, good, torch.tensor(1.0), Objective("kto", desirable_weight=2.0, undesirable_weight=0.5))
    assert lead.tolist() == pytest.approx([0.1 * (2 - 1), 0.1 * (1 + 3)]), "a good one above the baseline, a bad one below it"
    assert plain.tolist() == pytest.approx([1 - 1 / (1 + math.exp(-0.1)), 1 - 1 / (1 + math.exp(-0.4))])
    assert weighed.tolist() == pytest.approx([2 * float(plain[0]), 0.5 * float(plain[1])])


def test_another_label_is_another_row_also_after_it_was_kept(tmp_path: Path) -> None:
    rows = answers(2)
    before = row_agreement.digest(rows)
    rows[1].good = False
    assert row_agreement.digest(rows) != before
    row_cache.keep(tmp_path / "rows" / "a.rows", EncodedData(rows, answers(1)))
    kept = row_cache.load(tmp_path / "rows" / "a.rows")
    assert kept is not None and [row.good for row in (*kept.train, *kept.held_out)] == [True, False, True]


def of_lengths(own: list[int], others: list[int]) -> list[Row]:
    def row(place: int, length: int) -> Row:
        return Row(array("i", [place] * length), bytes([0, *[1] * (length - 1)]), (place,))

    rows = [row(place, length) for place, length in enumerate(own)]
    for place, length in enumerate(others):
        rows[place].other = row(place, length)
    return rows


@pytest.mark.parametrize("joined", [False, True])
def test_no_pass_over_other_answers_holds_more_than_its_rank_takes(joined: bool) -> None:
    """Short answers have others that are long: cut by the answers alone, the passes over the others would be."""
    rows = of_lengths([4, 4, 5, 5, 30, 4, 5, 6], [30, 12, 8, 14, 5, 30, 4, 25])
    limits = [Limits(60, 6, None, not joined), Limits(32, 2, 16, not joined)]
    balance = Balance([4, 4], limits, ["a", "b"], [Speed(0.0, 1e-3, 1e-4)] * 2, measured=True)
    form = Form(0, joined=joined, objective=Objective(kind="kto"))
    seen: list[int] = []
    for rank, most in enumerate(limits):
        item = StepBatches(rows, seed=1, global_batch=8, steps=1, balance=balance, rank=rank, form=form)[0]
        for batch in item.micro_batches + item.unmatched:
            assert batch["input_ids"].numel() <= most.pass_tokens and len(batch["good"]) <= (most.pass_rows or 8)
        lengths = [int(number) + 1 for batch in item.unmatched for number in batch["answer_tokens"]]
        assert max(lengths) <= (most.row_tokens or 30)
        seen += lengths
    assert sorted(seen) == sorted(len(row.other.tokens) for row in rows if row.other), "each once"


def test_the_base_reads_other_answers_in_passes_that_its_rank_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from homelab.worker.model import pair_loss
    from homelab.worker.training import reference_pass

    rows = of_lengths([4, 4, 5, 5, 30], [30, 12, 8, 14, 5])
    form = Form(0, objective=Objective(kind="kto"))
    balance = Balance([1], [Limits(60, 2)], ["a"], [Speed(0.0, 1e-3, 1e-4)], measured=True)
    figures = SimpleNamespace(summed_answers=None, take=lambda: None)
    sizes: list[tuple[int, int]] = []

    def evaluate(_model: Any, batches: list[dict[str, Any]], _form: Form, after_pass: Callable[[], None]) -> None:
        for batch in batches:
            sizes.append((len(batch["good"]), batch["input_ids"].numel()))
            figures.summed_answers = batch["answer_tokens"]
            after_pass()

    strategy = SimpleNamespace(counting_rank=0, part=SimpleNamespace(has_loss=True), evaluate=evaluate)
    trainer: Any = SimpleNamespace(
        strategy=strategy, train_dataset=SimpleNamespace(balance=balance, form=form), task=SimpleNamespace(resume_step=0),
        model=SimpleNamespace(eval=lambda: None),
    )  # fmt: skip
    monkeypatch.setattr(pair_loss, "figures_of", lambda model: figures)
    recorder: Any = SimpleNamespace(sign=lambda: None)
    found = {place: float(number) for place, number in reference_pass._computed(trainer, rows, recorder)}
    assert found == {
        2 * place + side: float(length - 1)
        for side, lengths in enumerate(([4, 4, 5, 5, 30], [30, 12, 8, 14, 5]))
        for place, length in enumerate(lengths)
    }
    assert all(count <= 2 and tokens <= 60 for count, tokens in sizes), sizes
