"""The look into the data before a launch: what it finds in good and broken files, and that a second look costs no tokenizer."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import data_files, inputs
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.facts.reading import read
from homelab.controller.features.preflight import data_sample
from homelab.controller.remote.fanout import Fleet
from homelab.shared.protocol import file_kind
from homelab.shared.protocol.data_rows import beginning
from homelab.shared.protocol.worker_messages import FileSample, SampleResult
from homelab.worker.data import readers
from homelab.worker.errors import WorkerError
from homelab.worker.tools import data_sample as looking
from homelab.worker.tools import sampled_rows
from tests.controller.checks import healthy
from tests.worker import harness

pytestmark = pytest.mark.timeout(300)
DATA = {"format": "auto", "completion_only": True, "packing": False, "split": "train", "text_column": "text", "eval_fraction": 0.0}


def look(path: Path, tokenizer: Any, *, seq_len: int = 512, **data: Any) -> FileSample:
    """One file, in this process."""
    question = {"files": {"train": {"path": str(path), "shown": "mine", "whole": True}}, "data": {**DATA, **data}, "seq_len": seq_len}
    return read(FileSample, looking.look(question, tokenizer)["train"])


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def to(name: str, text: str | bytes) -> Path:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path / name

    return to


def lines(rows: list[Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def test_the_tokens_are_those_that_the_worker_counts(write: Callable[..., Path], tokenizer: Any) -> None:
    from homelab.worker.data.encoding import load_data

    rows = harness.chat_rows(60)
    path = write("chats.jsonl", lines(rows))
    run = {"recipe": {"data": DATA, "train": {"seq_len": 120, "seed": 1}}, "data": {"train": {"path": str(path), "kind": "file"}}}
    trained = load_data(run, tokenizer).train
    found = look(path, tokenizer, seq_len=120)
    assert (found.whole, found.rows_read, found.tokens_sampled, found.form, found.needs_chat_template) == (True, 60, 60, "chat", True)
    assert found.kept_tokens == sum(len(row.tokens) for row in trained)
    assert found.rows_silent == sum(not row.loss_tokens for row in trained)
    whole = look(write("chats.jsonl", lines(rows)), tokenizer, seq_len=10_000)
    assert whole.rows_longer == 0 and found.rows_longer > 0 and found.longest_tokens == whole.longest_tokens > 120
    assert not found.rows_bad


@pytest.mark.parametrize(
    ("name", "text", "where", "message"),
    [
        (
            "a.jsonl",
            lines(harness.chat_rows(2)) + '{"messages": [{"role": "user", "con\n' + lines(harness.chat_rows(2)),
            "mine, line 3",
            "not JSON",
        ),
        ("a.jsonl", lines(harness.chat_rows(2)).encode() + b'"\xff"\n', "mine, line 3", "not UTF-8"),
        (
            "a.jsonl",
            lines([*harness.chat_rows(2), {"messages": [{"role": "user", "content": None}]}]),
            "mine, line 3, message 1",
            "must be text",
        ),
        ("a.jsonl", lines([*harness.chat_rows(2), {"text": "no chat"}]), "mine, line 3", 'no "messages"'),
        ("a.jsonl", lines([{"conversations": []}]), "mine, line 1", '"conversations"'),
        ("a.json", '[{"text": "a"}, {"text": "b"', "mine", "not JSON"),
        ("a.csv", 'prompt,completion\nwhy,so\nwhy,"so\n', "mine, line", "CSV"),
        ("a.csv", "prompt,completion\nwhy,so,and so\n", "mine, line 2", "number of columns"),
        ("a.jsonl", "\n\n", "mine", "no rows"),
        (
            "a.jsonl",
            lines([*harness.chat_rows(2), {"messages": [{"role": "user", "content": "r\ud800d"}]}]),
            "mine, line 3, message 1, key content",
            "half of a character, \\ud800,",
        ),
        ("a.jsonl", lines([{"text": "r\udc00d"}]), "mine, line 1, key text", "half of a character, \\udc00,"),
        ("a.jsonl", lines([{"\ud800": "a"}]), "mine, line 1", "it has"),
        ("a.jsonl", lines([{"text": "a"}]).encode("utf-16"), "mine", "UTF-16 text, not UTF-8"),
        ("a.jsonl", gzip.compress(lines([{"text": "a"}]).encode(), mtime=0), "mine", "compressed by gzip"),
    ],
)
def test_a_broken_row_is_named_as_the_worker_names_it(
    write: Callable[..., Path], tokenizer: Any, name: str, text: str | bytes, where: str, message: str
) -> None:
    found = look(write(name, text), tokenizer)
    assert found.rows_bad and found.rows_bad[0].where.startswith(where), found
    assert message in found.rows_bad[0].message and found.rows_bad[0].hint
    assert look(write(name, text), None).rows_bad == found.rows_bad, "it takes no tokenizer to see that"


WORDS = "it's mine.jsonl"


@pytest.mark.parametrize(
    ("name", "text", "kind", "command"),
    [
        (WORDS, '{"text": "ä"}'.encode("utf-16"), "UTF-16 text", "iconv -f UTF-16 -t UTF-8 {} > "),
        (WORDS, '{"text": "ä"}'.encode("utf-16-le"), "UTF-16LE text", "iconv -f UTF-16LE -t UTF-8 {} > "),
        (WORDS, '{"text": "ä"}'.encode("utf-16-be"), "UTF-16BE text", "iconv -f UTF-16BE -t UTF-8 {} > "),
        (WORDS, '{"text": "ä"}'.encode("utf-32"), "UTF-32 text", "iconv -f UTF-32 -t UTF-8 {} > "),
        (WORDS, gzip.compress(b"{}", mtime=0), "compressed by gzip", "mv {} {gz} && gunzip {gz}"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0), "compressed by gzip", "gunzip {}"),
        ("a.jsonl", lzma.compress(b"{}"), "compressed by xz", "unxz"),
        ("a.jsonl", bz2.compress(b"{}"), "compressed by bzip2", "bunzip2"),
        ("a.jsonl", b"\x28\xb5\x2f\xfd\x04\x00", "compressed by zstd", "unzstd"),
        ("a.csv", b"PK\x03\x04\x14\x00", "a zip archive", "unzip {}"),
        ("a.jsonl", b"PAR1\x15\x04", "a Parquet file", "a.parquet"),
    ],
)
def test_what_a_file_really_is_is_told_by_its_first_bytes(
    tmp_path: Path, write: Callable[..., Path], name: str, text: bytes, kind: str, command: str
) -> None:
    path = write(name, text)
    what, mend = file_kind.unmask(path, text[:16]) or ("", "")
    assert what.startswith(kind)
    assert command.format(shlex.quote(str(path)), gz=shlex.quote(f"{path}.gz")) in mend
    with pytest.raises(WorkerError, match=kind) as refused:
        readers.read({"kind": "file", "path": str(path), "sha256": None})
    assert refused.value.hint == mend


def test_the_command_that_mends_an_encoding_mends_it(tmp_path: Path, write: Callable[..., Path]) -> None:
    path = write(WORDS, lines([{"text": "grün"}]).encode("utf-16-le"))
    _, mend = file_kind.unmask(path, path.read_bytes()[:16]) or ("", "")
    subprocess.run(["/bin/sh", "-c", mend.partition(", and")[0]], check=True, timeout=10)
    assert readers.read({"kind": "file", "path": str(tmp_path / f"utf8-{WORDS}")})[0].fields == {"text": "grün"}


@pytest.mark.parametrize(
    ("content", "line", "text"),
    [
        ("“80 €” – é\n\ndünn\n".encode("cp1252"), 1, "“80 €” – é\n\ndünn\n"),
        ("„Ä“\n\n“80 €” é\n".encode("cp1252"), 1, "„Ä“\n\n“80 €” é\n"),  # two of its bytes happen to be a letter of UTF-8
        ("café grün\n\n".encode() + b"a \xff" + "red é\n\n".encode() + "“dünn”\n".encode(), 3, "café grün\n\na red é\n\n“dünn”\n"),
    ],
    ids=["Windows", "Windows that looks like UTF-8", "a stray byte"],
)  # fmt: skip
def test_the_command_for_text_that_is_not_utf8_keeps_its_letters(
    tmp_path: Path, write: Callable[..., Path], content: bytes, line: int, text: str
) -> None:
    path = write("a.txt", content)
    with pytest.raises(WorkerError) as refused:
        readers.read({"kind": "file", "path": str(path), "sha256": None})
    fault = data_files.fault([RecipeInput("train", "shipped", str(path), local=path)])
    assert fault is not None and (fault.message, fault.hint) == (refused.value.message, refused.value.hint)
    assert refused.value.where == f"{path}, line {line}" and fault.where.endswith(refused.value.where)
    command = refused.value.hint.removeprefix("leave such bytes out: ").partition(", and")[0]
    subprocess.run(["/bin/sh", "-c", command], check=False, timeout=10)
    assert (tmp_path / "utf8-a.txt").read_text() == text


def test_a_command_that_writes_beside_the_file_writes_beside_the_file_of_the_person(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write("a.jsonl", b'{"text": "\xff"}\n')
    question = {"files": {"train": {"path": str(path), "shown": "/data/a.jsonl", "whole": True}}, "data": DATA, "seq_len": 8}
    bad, *_ = looking.look(question, None)["train"]["rows_bad"]
    assert "/data/a.jsonl > /data/utf8-a.jsonl, and" in bad["hint"] and str(tmp_path) not in bad["hint"]


@pytest.mark.parametrize("text", ['{"text": "ä"}', "prompt,completion\n", "\ufeff{}", "é", "", "{", "日本"])
def test_an_ordinary_file_is_what_it_is(text: str) -> None:
    assert file_kind.unmask(Path("a.jsonl"), text.encode()) is None
    assert file_kind.unmask(Path("a.parquet"), b"PAR1\x15\x04") is None


def test_empty_answers_are_counted_and_the_first_is_named(write: Callable[..., Path], tokenizer: Any) -> None:
    rows = [{"prompt": "why", "completion": "so" if number % 4 else ["", " \n"][number % 8 == 0]} for number in range(40)]
    found = look(write("a.jsonl", lines(rows)), tokenizer)
    assert (found.rows_mute, found.rows_silent, found.mute_at) == (10, 0, "mine, line 1")
    empty = look(write("a.jsonl", lines([{**row, "completion": ""} for row in rows])), tokenizer)
    assert empty.rows_mute == empty.tokens_sampled == 40
    short = look(write("a.jsonl", lines([{"prompt": "why", "completion": "x"}])), tokenizer)
    assert (short.rows_mute, short.mute_at) == (0, ""), "one letter is an answer"


def test_the_longest_row_is_known_wherever_it_stands(write: Callable[..., Path], tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_rows, "MOST_ROWS", 5)
    rows = [{"text": "a few words"} for _ in range(40)]
    rows[17] = {"text": "word " * 2000}
    path = write("huge.jsonl", lines(rows))
    found = look(path, tokenizer)
    assert found.tokens_sampled == 5
    assert (found.longest_tokens, found.longest_at) == (10_001, "mine, line 18"), "a token per letter, and the end"
    monkeypatch.setattr(looking, "_LONGEST_CHARACTERS", 100)
    guessed = look(path, tokenizer)
    assert guessed.longest_at == "mine, line 18" and guessed.longest_tokens == pytest.approx(10_000, rel=0.1)


def test_the_longest_row_of_a_large_file_is_behind_its_beginning(
    write: Callable[..., Path], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from homelab.shared.protocol import data_rows

    rows = [{"text": "a few words"} for _ in range(40)]
    rows[31], rows[33] = {"text": "word " * 200}, {"text": "word " * 100}
    path = write("large.jsonl", lines(rows))
    start, whole = beginning(str(path), 300)
    assert start is not None and not whole
    longest = data_rows.longest_after(str(path), len(start))
    assert [(entry["line"], len(entry["text"])) for entry in longest[:2]] == [(32, entry_bytes(rows[31])), (34, entry_bytes(rows[33]))]
    assert len(longest) == data_rows.LONGEST_ROWS

    def asked(longest: list[dict[str, Any]]) -> FileSample:
        file = {"path": str(write("start.jsonl", start)), "shown": "mine", "whole": False, "longest": longest}
        return read(FileSample, looking.look({"files": {"train": file}, "data": DATA, "seq_len": 512}, tokenizer)["train"])

    found = asked(longest)
    assert (found.longest_tokens, found.longest_at) == (1001, "mine, line 32")
    monkeypatch.setattr(data_rows, "_LONGEST_BYTES", 100)  # too long to be sent: its size is told
    told = data_rows.longest_after(str(path), len(start))
    assert told[0]["text"] is None
    assert asked(told).longest_tokens == pytest.approx(1000, rel=0.2)
    assert data_rows.longest_after(str(path.with_suffix(".csv")), 0) == []


def test_of_a_table_that_is_read_where_it_lies_the_first_rows_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}] * 9), tmp_path / "a.parquet")
    question = {"files": {"train": {"path": str(tmp_path / "a.parquet"), "shown": "mine", "whole": False}}, "data": DATA, "seq_len": 8}
    for most, seen in ((10, (9, True)), (5, (5, False))):
        monkeypatch.setattr(looking, "MOST_OF_TABLE", most)
        monkeypatch.setattr(sampled_rows, "MOST_OF_TABLE", most)
        found = read(FileSample, looking.look(question, None)["train"])
        assert (found.rows_read, found.whole) == seen


def entry_bytes(row: dict[str, Any]) -> int:
    return len(lines([row]))


def test_no_more_than_three_broken_rows_are_named_and_the_others_are_counted(write: Callable[..., Path], tokenizer: Any) -> None:
    good = harness.chat_rows(30)
    text = "".join(f"{json.dumps(row)}\n{'{' if number % 5 == 0 else ''}\n" for number, row in enumerate(good))
    found = look(write("a.jsonl", text), tokenizer)
    assert [one.where for one in found.rows_bad] == ["mine, line 2", "mine, line 12", "mine, line 22"]
    assert found.rows_read == 11 == found.tokens_sampled


def test_a_template_may_refuse_a_row_that_has_the_right_form(write: Callable[..., Path], tokenizer: Any) -> None:
    import copy

    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + strict.chat_template
    )
    rows = harness.chat_rows(5)
    rows[3]["messages"] = [{"role": "system", "content": "be brief"}, *rows[3]["messages"]]
    found = look(write("a.jsonl", lines(rows)), strict)
    assert [one.where.split(",")[1] for one in found.rows_bad] == [" line 4"] and found.tokens_sampled == 4, found


def test_chats_for_a_tokenizer_without_a_template_are_read_and_not_counted(write: Callable[..., Path], tokenizer: Any) -> None:
    import copy

    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    found = look(write("a.jsonl", lines(harness.chat_rows(5))), plain)
    assert found.needs_chat_template and not found.tokens_sampled and not found.rows_bad
    text = look(write("b.jsonl", lines([{"prompt": "a", "completion": "b"}])), plain)
    assert not text.needs_chat_template and text.tokens_sampled == 1


def test_chats_are_refused_where_the_recipe_leaves_their_template_out(write: Callable[..., Path], tokenizer: Any) -> None:
    found = look(write("a.jsonl", lines(harness.chat_rows(2))), tokenizer, template="none")
    assert [(one.where, one.message[:22]) for one in found.rows_bad] == [
        (f"mine, line {line}", "this row has messages,") for line in (1, 2)
    ]
    assert not look(write("b.jsonl", lines([{"prompt": "a", "completion": "b"}])), tokenizer, template="none").rows_bad


def test_the_beginning_of_a_file_ends_with_a_row(tmp_path: Path) -> None:
    def of(name: str, text: str, limit: int) -> tuple[str | None, bool]:
        (tmp_path / name).write_bytes(text.encode())
        rows, whole = beginning(str(tmp_path / name), limit)
        return rows if rows is None else rows.decode(), whole

    assert of("a.jsonl", "{}\n{}\n", 6) == ("{}\n{}\n", True)
    assert of("a.jsonl", '{}\n{"text": "long"}\n', 9) == ("{}\n", False)
    assert of("a.jsonl", '{"text": "long"}\n', 9) == (None, False)
    assert of("a.csv", 'a,b\n1,"x\ny"\n2,z\n', 13) == ('a,b\n1,"x\ny"\n', False)
    assert of("a.csv", 'a,b\n1,"x\ny"\n2,z\n', 10) == ("a,b\n", False)
    assert of("a.txt", "one\ntwo\n\nthree\n", 11) == ("one\ntwo\n\n", False) or of("a.txt", "one\ntwo\n\nthree\n", 11)[0] == "one\ntwo\n"
    assert of("a.txt", "one\r\n\r\ntwo\r\n \r\nthree\r\n", 20) == ("one\r\n\r\ntwo\r\n \r\n", False)
    assert of("a.json", '[{"text": "a"}, {"text": "b"}, {"text": "c"}]', 35) == ('[{"text": "a"}, {"text": "b"}]', False)
    assert of("a.parquet", "PAR1" * 9, 20) == (None, False)


def evidence_of(workdir: Path, model: Path | None, data: dict[str, str] | None = None) -> Any:
    """One node, which is this machine."""
    cluster = Cluster.model_validate(
        {"name": "here", "nodes": [{"name": "tower", "host": "local", "python": sys.executable, "workdir": str(workdir)}]}, strict=False
    )
    facts = Facts.model_validate({
        "node": "tower", "python": {"executable": str(workdir), "packages": {"transformers": "5"}},
        "model": {"found": True, "path": str(model)} if model else None,
        "data": {role: {"path": path, "found": True, "sha256": "ab" * 32} for role, path in (data or {}).items()},
    })  # fmt: skip
    return Evidence(cluster=cluster, head="tower", master_port=29500, facts={"tower": facts}, data=data or {})


def recipe_of(**data: Any) -> TrainRecipe:
    return healthy.recipe(model={"name": "/m"}, data=data, train={"global_batch": 12, "steps": 1, "learning_rate": 1e-3, "seq_len": 100})


@pytest.mark.slow
@pytest.mark.thorough  # every preflight of the other tests looks, too
def test_a_node_looks_once_and_answers_the_second_time_from_what_it_kept(tmp_path: Path, model: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(lines(harness.chat_rows(40)))
    (tmp_path / "eval.jsonl").write_text(lines(harness.chat_rows(3)) + "{\n")
    (tmp_path / "r.toml").write_text("")
    recipe = recipe_of(train="chats.jsonl", eval="eval.jsonl")
    items = inputs.of_recipe(recipe, tmp_path / "r.toml")
    evidence = evidence_of(tmp_path / "work", model)
    with Fleet(evidence.cluster) as fleet:
        first = data_sample.look(fleet, evidence, recipe, items)
        assert isinstance(first, SampleResult) and first.refused is None and first.tokenizer is None and first.node == "tower"
        assert first.files["train"].tokens_sampled == 40 and first.files["train"].rows_longer > 0
        (bad,) = first.files["eval"].rows_bad
        assert bad.where == f"{tmp_path}/eval.jsonl, line 4"
        kept = json.loads((tmp_path / "work/samples.json").read_text())
        ((key, value),) = kept.items()
        value["files"]["train"]["rows_read"] = 77  # what is kept is what is answered
        (tmp_path / "work/samples.json").write_text(json.dumps({key: value}))
        second = data_sample.look(fleet, evidence, recipe, items)
        assert second is not None and second.files["train"].rows_read == 77


def test_the_kept_verdict_is_that_of_the_file_as_it_is_called_now(tmp_path: Path) -> None:
    """The name says how a file is read, and the verdict names its path: equal content is no equal question."""

    def key(name: str, **data: Any) -> tuple[str, list[str]]:
        (tmp_path / name).write_text('{"text": "a"}\n')
        recipe = recipe_of(train=name, **data)
        items = inputs.of_recipe(recipe, tmp_path / "r.toml")
        request, _ = data_sample.question(evidence_of(tmp_path, None), recipe, {item.role: item for item in items}, "tower", None)
        return request["key"], [file["shown"] for file in request["files"].values()]

    (tmp_path / "sub").mkdir()
    seen = [key("chats.data"), key("chats.jsonl"), key("sub/chats.jsonl"), key("chats.jsonl", text_column="body")]
    assert len({found for found, _ in seen}) == 4
    assert [shown for _, shown in seen[:3]] == [[f"{tmp_path}/{name}"] for name in ("chats.data", "chats.jsonl", "sub/chats.jsonl")]
    assert key("chats.jsonl") == seen[1]
    on_nodes = []
    for path in ("/data/chats.data", "/data/chats.jsonl"):
        recipe = recipe_of(train=path)
        items = {item.role: item for item in inputs.of_recipe(recipe, tmp_path / "r.toml")}
        on_nodes.append(data_sample.question(evidence_of(tmp_path, None, {"train": path}), recipe, items, "tower", None)[0]["key"])
    assert on_nodes[0] != on_nodes[1]


def test_a_tokenizer_that_does_not_load_is_told_as_such(tmp_path: Path, model: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((model / "tokenizer.json").read_text()[:2000])
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(WorkerError, match="the tokenizer cannot be loaded"):
        looking.load(str(tmp_path), None)


def test_without_a_model_the_rows_are_read_all_the_same_and_a_node_that_refuses_breaks_nothing(tmp_path: Path) -> None:
    path = tmp_path / "there.jsonl"
    path.write_text(lines([*harness.chat_rows(4), {"messages": 3}]))
    recipe = recipe_of(train=str(path))
    items = inputs.of_recipe(recipe, tmp_path / "r.toml")
    evidence = evidence_of(tmp_path / "work", None, {"train": str(path)})
    with Fleet(evidence.cluster) as fleet:
        found = data_sample.look(fleet, evidence, recipe, items)
        assert found is not None and found.files["train"].rows_bad[0].where == f"{path}, line 5"
        assert path.read_text().count("\n") == 5, "the file itself is left alone"
        assert data_sample.look(fleet, evidence, healthy.script(), []) is None
        path.unlink()
        # Facts of another Python make it another question.
        gone = data_sample.look(fleet, evidence_of(tmp_path / "other", None, {"train": str(path)}), recipe, items)
        assert gone is not None and gone.refused and "No such file" in gone.refused


def test_who_looks_has_the_model_and_the_data_of_most_nodes() -> None:
    recipe = healthy.recipe()
    evidence = healthy.cpu(recipe)
    items = inputs.of_recipe(recipe, Path("/nowhere/r.toml"))

    def place(evidence: Any) -> tuple[str, str | None]:
        return data_sample._place(evidence, {item.role: item for item in items})

    assert place(evidence) == ("tower", "/home/me/models/smol")
    assert place(healthy.with_facts(evidence, "oldtower", system={"cpu_count": 16}))[0] == "oldtower", "the fastest has most cores"
    other = {"train": {"path": "/data/train.jsonl", "found": True, "sha256": "cd" * 32}}
    assert place(healthy.with_facts(evidence, "tower", data=other))[0] == "laptop"
    assert place(healthy.with_facts(evidence, "tower", model={"found": False}))[0] == "laptop"
    assert place(healthy.packages(evidence, "tower", transformers=None))[0] == "laptop"
    for name in healthy.NAMES:
        evidence = healthy.with_facts(evidence, name, model={"found": False})
    assert place(evidence) == ("tower", None)


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        (
            [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 1}],
            {},
            "ShareGPT (conversations, from and value)",
        ),
        (
            [{"instruction": "a", "output": "b"}, {"instruction": "a", "input": "c", "output": "b", "id": 1}],
            {},
            "Alpaca (instruction, input, output)",
        ),
        ([{"ask": "a", "say": "b", "id": 1}], {"columns": {"prompt": "ask", "completion": "say"}}, "ask and say"),
        ([{"body": "a", "id": 1}], {}, "text (body)"),
    ],
)
def test_the_look_reads_rows_as_the_worker_does(
    write: Callable[..., Path], tokenizer: Any, rows: list[Any], settings: dict[str, Any], said: str
) -> None:
    from homelab.worker.data.encoding import load_data

    path = write("rows.jsonl", lines(rows))
    run = {
        "recipe": {"data": {**DATA, **settings}, "train": {"seq_len": 512, "seed": 1}},
        "data": {"train": {"path": str(path), "kind": "file"}},
    }
    trained = load_data(run, tokenizer)
    found = look(path, tokenizer, **settings)
    assert found.read_as == said and f"{len(rows)} rows as {said}, " in trained.notes[0] and not found.rows_bad
    assert found.kept_tokens == sum(len(row.tokens) for row in trained.train)
    assert found.unused == ('"id" (in 1 rows)',) and 'train data: these keys are not used: "id" (in 1 rows)' in trained.notes
    assert look(path, None, **settings).read_as == said, "also without a tokenizer"
    bad = write("bad.jsonl", lines([*rows, {"title": "no such row"}]))
    with pytest.raises(WorkerError) as caught:
        load_data({**run, "data": {"train": {"path": str(bad), "kind": "file"}}}, tokenizer)
    (one,) = look(bad, tokenizer, **settings).rows_bad
    assert (one.message, one.hint) == (caught.value.message, caught.value.hint) and one.where == f"mine, line {len(rows) + 1}"
