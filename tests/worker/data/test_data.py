"""What is trained on: masks token by token, formats, errors that name the row, packing that cannot be told from no packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from homelab.shared.law.limits import Limits
from homelab.shared.protocol import row_forms
from homelab.worker.balancing.balancer import Balance
from homelab.worker.data import batches, encoding, readers
from homelab.worker.data.rows import Row
from homelab.worker.errors import WorkerError
from tests.worker import harness

pytestmark = pytest.mark.timeout(60)

SETTINGS = {"format": "auto", "completion_only": True, "packing": False, "split": "train", "text_column": "text", "eval_fraction": 0.0}
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four é"},
]


def encode(tokenizer: Any, rows: list[dict[str, Any]], *, seq_len: int = 256, **settings: Any) -> tuple[list[Row], list[str]]:
    notes: list[str] = []
    encoder = encoding.Encoder(tokenizer, SETTINGS | settings, seq_len, notes.append)
    return encoder.encode([readers.Record(i, f"rows, line {i + 1}", row) for i, row in enumerate(rows)], "train"), notes


def trained_text(tokenizer: Any, row: Row) -> str:
    return tokenizer.decode([token for token, trained in zip(row.tokens, row.trained, strict=True) if trained])


def whole_text(tokenizer: Any, row: Row) -> str:
    return tokenizer.decode(list(row.tokens))


def test_only_what_the_assistant_says_carries_loss_in_every_turn(tokenizer) -> None:
    (row,), _ = encode(tokenizer, [{"messages": CHAT}])
    expected = (
        "<|start|>system\nbe kind<|end|>\n<|start|>user\none<|end|>\n<|start|>assistant\ntwo<|end|>\n"
        "<|start|>user\nthree<|end|>\n<|start|>assistant\nfour é<|end|>\n"
    )
    assert whole_text(tokenizer, row) == expected
    assert trained_text(tokenizer, row) == "two<|end|>four é<|end|>"
    # Token by token: bytes are tokens here, so positions in the text are positions in the row.
    flat = tokenizer.convert_ids_to_tokens(list(row.tokens))
    marks = [token for token, trained in zip(flat, row.trained, strict=True) if trained]
    assert marks == ["t", "w", "o", "<|end|>", "f", "o", "u", "r", "Ġ", "Ã", "©", "<|end|>"]


def test_everything_carries_loss_when_asked(tokenizer) -> None:
    (row,), _ = encode(tokenizer, [{"messages": CHAT}], completion_only=False)
    assert row.trained[0] == 0, "nothing predicts the first token"
    assert all(row.trained[1:])


def test_the_real_models_template(tokenizer) -> None:
    """A template that adds a system message of its own must not shift the spans."""
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|start|>system\nhelp<|end|>\n{% endif %}"
        "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    (row,), _ = encode(tokenizer, [{"messages": CHAT[1:]}])
    assert trained_text(tokenizer, row) == "two<|end|>four é<|end|>"


def test_a_template_that_rewrites_history_trains_the_last_turn_and_says_so(tokenizer) -> None:
    """Reasoning models drop the thoughts of earlier turns: what stands there is not what the model once said."""
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}thinking {% endif %}"
        "{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    (row,), notes = encode(tokenizer, [{"messages": CHAT}])
    assert trained_text(tokenizer, row) == "thinking four é<|end|>"
    assert any("rewrites earlier turns in 1 rows" in note for note in notes)


def test_prompt_and_completion_as_text_without_a_template(tokenizer) -> None:
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = None
    (row,), _ = encode(tokenizer, [{"prompt": "2+2=", "completion": "4"}])
    assert whole_text(tokenizer, row) == "2+2=4<|end|>"
    assert trained_text(tokenizer, row) == "4<|end|>"
    (row,), _ = encode(tokenizer, [{"prompt": "2+2=", "completion": "4"}], completion_only=False)
    assert trained_text(tokenizer, row) == "+2=4<|end|>"


def test_prompt_and_completion_go_through_the_chat_template(tokenizer) -> None:
    (row,), _ = encode(tokenizer, [{"prompt": "hi", "completion": "yo"}])
    assert whole_text(tokenizer, row) == "<|start|>user\nhi<|end|>\n<|start|>assistant\nyo<|end|>\n"
    assert trained_text(tokenizer, row) == "yo<|end|>"


def test_prompt_and_completion_stay_as_they_are_where_the_recipe_says_so(tokenizer) -> None:
    """As TRL has them: joined, and the end token behind."""
    (row,), _ = encode(tokenizer, [{"prompt": "2+2=", "completion": "4"}], template="none")
    assert whole_text(tokenizer, row) == "2+2=4<|end|>" and trained_text(tokenizer, row) == "4<|end|>"
    for chat in ({"messages": CHAT}, {"prompt": CHAT[:4], "completion": CHAT[4:]}, {"prompt": "a", "completion": CHAT[2:3]}):
        with pytest.raises(WorkerError, match=r'this row has messages.*\[data\] template = "none"') as caught:
            encode(tokenizer, [chat], template="none")
        assert caught.value.where == "rows, line 1" and 'template = "auto"' in caught.value.hint


def test_answers_within_the_prompt_carry_no_loss(tokenizer) -> None:
    (row,), _ = encode(tokenizer, [{"prompt": CHAT[:4], "completion": CHAT[4:]}])
    assert trained_text(tokenizer, row) == "four é<|end|>"


def test_plain_text(tokenizer) -> None:
    (row,), notes = encode(tokenizer, [{"text": "hello"}])
    assert whole_text(tokenizer, row) == "hello<|end|>"
    assert trained_text(tokenizer, row) == "ello<|end|>"
    assert any("1 rows as text" in note for note in notes)


def test_rows_are_cut_to_seq_len_counted_and_kept(tokenizer) -> None:
    rows, notes = encode(tokenizer, [{"messages": CHAT}, {"messages": CHAT[1:3]}], seq_len=40)
    assert [len(row.tokens) for row in rows] == [40, 27]
    assert any("1 of 2 rows are longer than seq_len 40" in note for note in notes)
    silent, notes = encode(tokenizer, [{"messages": CHAT}], seq_len=12)
    assert silent[0].loss_tokens == 0
    assert any("1 rows have no trained token" in note for note in notes)


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        ({"question": "a"}, 'no "messages", "prompt" and "completion", or "text", it has "question"', "format"),
        ({"conversations": []}, "conversations", '"from" to "role"'),
        ({"instruction": "a"}, 'it has "instruction"', '"prompt" and "completion"'),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences", 'columns = { prompt = "prompt", completion = "chosen" }'),
        ({"messages": []}, "at least one message", "role"),
        ({"messages": [{"role": "user"}]}, '"content" must be text', "role"),
        ({"messages": [{"role": "user", "content": 3}]}, '"content" must be text, here it is int', "role"),
        ({"text": None}, '"text" must be text, here it is NoneType', '"text": "..."'),
    ],
)
def test_a_bad_row_is_named_with_the_mending_edit(tokenizer, row: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(WorkerError) as caught:
        encode(tokenizer, [row])
    assert message in caught.value.message
    assert "rows, line 1" in caught.value.where
    assert hint in caught.value.hint


def test_a_later_row_of_another_format_is_named(tokenizer) -> None:
    with pytest.raises(WorkerError, match='no "messages"') as caught:
        encode(tokenizer, [{"messages": CHAT}, {"text": "a"}])
    assert caught.value.where == "rows, line 2"


def test_files_of_every_kind_give_the_same_rows(tmp_path: Path) -> None:
    import csv

    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": 'a, "b"', "completion": "c\nd"}, {"prompt": "é", "completion": "f"}]
    harness.write_jsonl(tmp_path / "d.jsonl", rows)
    (tmp_path / "d.json").write_text(json.dumps(rows))
    with (tmp_path / "d.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    for suffix in ("jsonl", "json", "csv", "parquet"):
        read = readers.read({"path": str(tmp_path / f"d.{suffix}"), "kind": "file"})
        assert [record.fields for record in read] == rows, suffix
        assert [record.index for record in read] == [0, 1]


def test_keys_that_a_table_has_filled_with_null_are_not_learned(tmp_path: Path, tokenizer: Any) -> None:
    """A JSON line keeps the null that somebody wrote, and a run that began with filled keys goes on with them."""
    import copy

    import pyarrow
    import pyarrow.parquet

    def row(name: str, **arguments: object) -> dict[str, Any]:
        properties = {key: {"type": "string"} for key in arguments}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {
            "messages": [{"role": "user", "content": "Do"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
            "tools": [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}],
        }

    rows = [row("look", city="Rome", near=[{"lat": "1"}, {"lon": "2"}]), row("count", expr="1 + 1")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ tools | tojson }}" + (
        "{% for message in messages %}{{ message.role }}:{{ message.content }}{{ message.tool_calls | default([]) | tojson }}\n{% endfor %}"
    )

    def texts(file: Path, rules: int | None) -> list[str]:
        run = {"recipe": {"data": SETTINGS, "train": {"seq_len": 2000, "seed": 1}}, "data": {"train": harness.source(file)}, "rows": rules}
        return [whole_text(tokenizer, row) for row in encoding.load_data(run, strict).train]

    plain = harness.write_jsonl(tmp_path / "d.jsonl", rows)
    as_written = harness.write_jsonl(tmp_path / "null.jsonl", [row("look", city=None)])
    assert texts(tmp_path / "d.parquet", row_forms.RULES) == texts(plain, row_forms.RULES)
    assert "null" in texts(as_written, row_forms.RULES)[0]
    assert all("null" in text for rules in (2, None) for text in texts(tmp_path / "d.parquet", rules))


def test_paragraphs_of_a_text_file_are_samples(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("\none\ntwo\n\n\nthree\n")
    read = readers.read({"path": str(tmp_path / "d.txt"), "kind": "file"})
    assert [(record.where.rsplit(", ")[-1], record.fields["text"]) for record in read] == [("line 2", "one\ntwo"), ("line 6", "three")]


@pytest.mark.parametrize(
    ("name", "content", "message", "where"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text": \n', "not JSON", "line 2"),
        ("d.jsonl", b'{"text": "a"}\n["b"]\n', "this one is list", "line 2"),
        ("d.jsonl", b"\n\n", "no rows", "d.jsonl"),
        ("d.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "not UTF-8: invalid start byte at byte 11 of the line", "line 2"),
        ("d.json", b'{"text": "a"}', "list of objects", "d.json"),
        ("d.csv", b"prompt,completion\na,b,c\n", "number of columns", "line 2"),
        ("d.csv", b'text\n"a\n', "not CSV", "line 1"),
        ("d.parquet", b"PAR1nothing", "not a readable Parquet", "d.parquet"),
        ("d.doc", b"a", 'ends in ".doc"', "[data] train"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes, message: str, where: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WorkerError) as caught:
        readers.read({"path": str(tmp_path / name), "kind": "file"})
    assert message in caught.value.message
    assert where in caught.value.where
    assert caught.value.hint


def test_another_file_than_the_launched_one_is_refused(tmp_path: Path) -> None:
    path = harness.write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}])
    launched = harness.source(path)
    assert len(readers.read(launched)) == 1
    path.write_text('{"text": "b"}\n')
    with pytest.raises(WorkerError, match="differs from the one this run was launched with") as caught:
        readers.read(launched, node="mini", run="r-1")
    assert f"copy the same file to every node: {path} on mini" in caught.value.hint
    for _ in range(2):  # another one, and none
        with pytest.raises(WorkerError) as caught:
            readers.read({**launched, "sent": "shipped"}, node="mini", run="r-1")
        assert "homelab recover r-1 sends the original to mini again" in caught.value.hint and "copy" not in caught.value.hint
        path.unlink(missing_ok=True)


def test_the_held_out_part_depends_on_the_seed_alone(tokenizer) -> None:
    rows, _ = encode(tokenizer, harness.chat_rows(40))
    train, held_out = encoding.hold_out(rows, 0.1, 7)
    assert len(held_out) == 4
    assert sorted(row.sources[0] for row in train + held_out) == list(range(40))
    assert [row.sources for row in encoding.hold_out(rows, 0.1, 7)[1]] == [row.sources for row in held_out]
    assert [row.sources for row in encoding.hold_out(rows, 0.1, 8)[1]] != [row.sources for row in held_out]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_lose_exactly_what_single_rows_lose(model: Path, tokenizer, attention: str) -> None:
    """Attention across samples would change the loss; so would padding, and rows of unequal length."""
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention).eval()
    llama.config.use_cache = False  # as the worker does: with a cache, transformers ignores where samples end
    rows, _ = encode(tokenizer, harness.chat_rows(12))
    packed = encoding.pack_rows(rows, 300)
    assert len(packed) < 8 and len({len(row.tokens) for row in packed}) > 1
    assert sorted(source for row in packed for source in row.sources) == list(range(12))
    one = torch.tensor(1)
    with torch.no_grad():
        singly = [float(llama(**batches.collate([row], 0, packed=False), num_items_in_batch=one).loss) for row in rows]
        padded = float(llama(**batches.collate(rows, 0, packed=False), num_items_in_batch=one).loss)
        together = float(llama(**batches.collate(packed, 0, packed=True), num_items_in_batch=one).loss)
        crossing = batches.collate(packed, 0, packed=True)
        crossing.pop("position_ids")
        crossed = float(llama(**crossing, num_items_in_batch=one).loss)
    assert padded == pytest.approx(sum(singly), rel=1e-6)
    assert together == pytest.approx(sum(singly), rel=1e-6)
    assert crossed != pytest.approx(sum(singly), rel=1e-6), "the check itself must be able to fail"


def test_a_stand_in_has_a_gradient_of_zero(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model)
    batch = batches.collate([batches.stand_in(0)], 0, packed=False)
    loss = llama(**batch, num_items_in_batch=torch.tensor(5)).loss
    loss.backward()
    assert float(loss) == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in llama.parameters())


def test_a_rank_without_rows_gets_the_stand_in_and_lists_nothing(tokenizer) -> None:
    rows, _ = encode(tokenizer, harness.chat_rows(5))
    balance = Balance([3, 1, 0], [Limits(512, 2)] * 3, ["a", "b", "c"], [None] * 3, measured=False)
    common: dict[str, Any] = {"seed": 1, "global_batch": 4, "steps": 2, "balance": balance, "form": batches.Form(0)}
    items = [[batches.StepBatches(rows, rank=rank, **common)[step] for rank in range(3)] for step in range(2)]
    assert items[0][2].sources == [] and len(items[0][2].micro_batches) == 1
    assert (items[0][2].micro_batches[0]["labels"] == -100).all()
    assert sorted(source for step in items for item in step for source in item.sources) == [0, 1, 2, 3, 4]
    for step in items:
        counted = sum(batches.loss_tokens(batch) for item in step for batch in item.micro_batches)
        assert {item.loss_tokens for item in step} == {counted}
