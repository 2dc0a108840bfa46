"""All ranks train on the same rows, and on those that the run began with; who does not is named before the first step."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from homelab.shared.protocol import checkpoint_copies
from homelab.worker.data import row_agreement
from homelab.worker.data.rows import EncodedData, Row
from homelab.worker.errors import TrainingError
from homelab.worker.runtime import process_group
from tests.worker import harness

pytestmark = pytest.mark.timeout(100)
OLD, NEW = "a1" * 20, "b2" * 20
NODES = ("tower", "mini", "laptop")


def test_a_node_with_other_rows_and_data_that_changed_between_attempts(forks: harness.Forks, tmp_path: Path, model: Path) -> None:
    """Real ranks. Nothing else would tell: run.json of before has no digest of the file, as of a data set that the hub does not name by commit."""
    rows = harness.chat_rows(24)
    data = harness.write_jsonl(tmp_path / "chats.jsonl", rows)
    run = harness.make_run(tmp_path / "run", model, data, train__steps=4, train__epochs=None)
    described = json.loads((run / "run.json").read_text())
    described["data"]["train"]["sha256"] = None
    (run / "run.json").write_text(json.dumps(described))
    places = ["tower", "laptop"]
    other = harness.write_jsonl(tmp_path / "other.jsonl", [*rows[:-1], {"messages": [*rows[-1]["messages"], *rows[0]["messages"]]}])

    def another_file_on_laptop() -> None:
        file = harness.folder_of(run, "laptop", places) / "run.json"
        own = json.loads(file.read_text())
        own["data"]["train"]["path"] = str(other)
        file.write_text(json.dumps(own))

    codes, output = forks.run(run, 1, [6, 6], nodes=places, prepare=another_file_on_laptop)
    assert codes == [1, 1], output
    error = harness.error_of(run, 1)
    assert error["message"] == "the ranks do not have the same train rows: rank 1 (laptop) has different ones from rank 0 (tower)", error
    assert error["where"] == str(data) and "laptop" in error["hint"] and not harness.losses(run, 1)
    forks.train(run, 2, [12])
    kept = json.loads((run / "checkpoints" / "step-00000002" / row_agreement.LAW).read_text())["rows"]
    assert set(kept) == {"train", "eval"} and len(kept["train"]["sha256"]) == 64 and kept["train"]["commit"] == ""
    data.write_bytes(other.read_bytes())
    codes, output = forks.run(run, 3, [12], resume_step=2)
    error = harness.error_of(run, 3)
    assert codes == [1] and error["message"].startswith("the train rows differ from those at the beginning of this run"), output


def said_by(rows: str, commit: str) -> dict[str, dict[str, str]]:
    """What a rank has: `rows` stands for them."""
    train = EncodedData([Row(tokens_of(rows), bytes(len(rows)), (0,))], [], commits={"train": commit})
    return row_agreement.of(train)


def tokens_of(text: str) -> Any:
    return array("i", map(ord, text))


def refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *everyone: dict[str, dict[str, str]], began: dict[str, Any] | None = None
) -> TrainingError | None:
    """What the last one of `everyone` is told, each on a node of its own; None for nothing."""

    def numbers(mine: dict[str, dict[str, str]]) -> list[float]:
        return [
            number for role in row_agreement.ROLES for key in ("sha256", "commit") for number in checkpoint_copies.numbers(mine[role][key])
        ]

    monkeypatch.setattr(process_group, "gather", lambda values: [*map(numbers, everyone[:-1]), values])
    resume = None
    if began is not None:
        resume = tmp_path / "step"
        resume.mkdir(exist_ok=True)
        (resume / row_agreement.LAW).write_text(json.dumps({"rows": began}))
    source = {"kind": "hub", "path": "org/name", "config": "two", "split": "train"}
    task = harness.task_of(tmp_path / "r-1", NODES[: len(everyone)])
    task.run["data"]["train"] = source
    try:
        row_agreement.refuse_other(everyone[-1], task, resume)
    except TrainingError as error:
        return error
    return None


def test_another_revision_of_the_hub_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    same = said_by("rows", NEW)
    assert refusal(monkeypatch, tmp_path, same, same, same) is None
    error = refusal(monkeypatch, tmp_path, same, same, said_by("other", OLD))
    assert error is not None and error.message.endswith("rank 2 (laptop) has different ones from rank 0 (tower), rank 1 (mini)")
    assert error.where == f"hub:org/name, configuration two, split train: revision {OLD[:12]} on laptop, {NEW[:12]} on tower"
    assert error.hint.startswith("let laptop reach the hub")
    tokenizer = refusal(monkeypatch, tmp_path, same, said_by("other", NEW))
    assert tokenizer is not None and "revision" not in tokenizer.where and "preflight" in tokenizer.hint


def test_a_data_set_that_changed_its_revision_between_attempts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    began, now = said_by("old", OLD), said_by("new", NEW)
    assert refusal(monkeypatch, tmp_path, began, began, began=began) is None
    assert refusal(monkeypatch, tmp_path, began, began, began=said_by("old", NEW)) is None, (
        "the same rows under another commit are the same"
    )
    error = refusal(monkeypatch, tmp_path, now, now, began=began)
    assert error is not None and error.message == "this data set was changed since the run began: its train rows are different"
    assert (
        error.where.endswith(f"revision {NEW[:12]} now, and {OLD[:12]} when this run began") and f'[data] revision = "{OLD}"' in error.hint
    )
    odd = refusal(monkeypatch, tmp_path, now, now, began, began=began)
    assert odd is not None and "rank 0 (tower), rank 1 (mini) has different ones from rank 2 (laptop)" in odd.message, (
        "what the run began with is right, not the most"
    )
    assert refusal(monkeypatch, tmp_path, now, now, began={"train": 5}) is None, "a checkpoint of before is taken as it is"


def test_the_digest_is_of_all_that_trains() -> None:
    def digest(tokens: bytes, trained: bytes, starts: tuple[int, ...] = (0,)) -> str:
        return row_agreement.digest([Row(tokens_of(tokens.decode()), trained, (0,), starts)])

    assert len({digest(b"abc", b"\0\1\1"), digest(b"abd", b"\0\1\1"), digest(b"abc", b"\0\0\1"), digest(b"abc", b"\0\1\1", (0, 2))}) == 4
    one, two = Row(tokens_of("a"), b"\1", (0,)), Row(tokens_of("b"), b"\1", (1,))
    assert row_agreement.digest([one, two]) != row_agreement.digest([two, one])
