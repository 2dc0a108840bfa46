"""Data sets of the hub by the real `datasets`, from a hub on loopback: configurations, splits, one commit for all, and a hub that is away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import inputs, planner
from homelab.controller.checks.training import data as data_checks
from homelab.controller.features.launch import run_description
from homelab.controller.features.preflight import data_sample
from homelab.controller.remote.fanout import Fleet
from tests.worker.fake_hub import Hub
from tests.worker.harness import REPOSITORY
from tests.worker.tools.test_sample import evidence_of, recipe_of

pytestmark = pytest.mark.timeout(120)
NAME = "org/wikitext"
CARD = """---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - {split: train, path: two/train.jsonl}
  - {split: validation, path: two/validation.jsonl}
- config_name: wikitext-103-raw-v1
  data_files:
  - {split: train, path: big/train.jsonl}
---
"""
TWO: dict[str, Any] = {"path": NAME, "config": "wikitext-2-raw-v1", "split": "train", "revision": None}
# One line a question, one line an answer; "offline" is what HF_HUB_OFFLINE or a cable that is out makes of both libraries.
PROGRAM = """
import json, sys
import datasets, huggingface_hub.constants
from homelab.worker.data import hub
from homelab.worker.errors import WorkerError
for line in sys.stdin:
    question = json.loads(line)
    if question == "offline":
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
        continue
    try:
        rows, commit = hub.load(question, node="laptop", run="r-1")
        print(json.dumps([[row.fields for row in rows], commit]))
    except WorkerError as error:
        print(json.dumps(error.as_dict()))
"""


def files(word: str) -> dict[str, str]:
    def rows(count: int) -> str:
        return "".join(f"{json.dumps({'text': f'{word} {number}'})}\n" for number in range(count))

    return {"README.md": CARD, "two/train.jsonl": rows(5), "two/validation.jsonl": rows(1), "big/train.jsonl": rows(9)}


@pytest.fixture
def hub() -> Iterator[Hub]:
    started = Hub()
    yield started
    started.close()


def environment(hub: Hub, home: Path) -> dict[str, str]:
    found = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return found | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }


def ask(hub: Hub, home: Path, questions: list[Any]) -> list[Any]:
    """What one node answers, one after another."""
    said = "".join(f"{json.dumps(question)}\n" for question in questions)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=said, capture_output=True, text=True, env=environment(hub, home), timeout=100
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_node_and_every_attempt_loads_the_commit_of_the_launch(hub: Hub, tmp_path: Path) -> None:
    old, new = hub.push(NAME, files("old")), hub.push(NAME, files("new"))
    # A node that has loaded both; the newest last, for a training of its own.
    newest, first, held, large, no_config, no_split, no_set, *away = ask(hub, tmp_path / "both", [
        TWO, {**TWO, "revision": old}, {**TWO, "split": "validation"}, {**TWO, "config": "wikitext-103-raw-v1"}, {**TWO, "config": None},
        {**TWO, "split": "nothing"}, {**TWO, "path": "org/none"}, "offline", TWO, {**TWO, "revision": old}, {**TWO, "revision": new},
        {**TWO, "revision": "a" * 40}, {**TWO, "path": "org/none"},
    ])  # fmt: skip
    assert (newest[1], first[1]) == (new, old)
    assert (newest[0][0]["text"], first[0][0]["text"], len(first[0])) == ("new 0", "old 0", 5)
    assert (len(held[0]), len(large[0])) == (1, 9)
    assert "wikitext-103-raw-v1" in no_config["message"] and "[data] train, eval, config" in no_config["hint"]
    assert "validation" in no_split["message"] and "split nothing" in no_split["where"] and "org/none" in no_set["message"]
    assert [answer[1] for answer in away[1:3]] == [old, new], "the hub is away, and both are in the cache"
    unknown = away[4]
    assert "Couldn't reach 'org/none'" in unknown["message"] and unknown["hint"].startswith("let this node reach https://huggingface.co")
    refused = away[3]
    assert refused["message"].startswith(
        f"laptop has revision {away[0][1][:12]} of this data set, and the run was launched with aaaaaaaaaaaa"
    )
    assert "node laptop" in refused["where"] and "homelab recover r-1" in refused["hint"]


@pytest.mark.thorough  # some seconds of processor time
def test_preflight_looks_into_it_and_the_launch_keeps_the_commit(
    hub: Hub, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = hub.push(NAME, files("a row of text"))
    for key in [key for key in os.environ if key.startswith("HF_")]:
        monkeypatch.delenv(key)
    for key, value in environment(hub, tmp_path / "home").items():
        monkeypatch.setenv(key, value)
    recipe = recipe_of(train=f"hub:{NAME}", config="wikitext-2-raw-v1", eval=f"hub:{NAME}", eval_split="test")
    items = inputs.of_recipe(recipe, tmp_path / "r.toml")
    evidence = evidence_of(tmp_path / "work", model)
    with Fleet(evidence.cluster) as fleet:
        found = data_sample.look(fleet, evidence, recipe, items)
    assert found is not None and found.refused is None and found.tokenizer is None, found
    train = found.files["train"]
    assert (train.revision, train.rows_read, train.whole, train.form, train.tokens_sampled) == (sha, 5, True, "text", 5)
    assert not (tmp_path / "work" / "samples.json").exists(), "the hub may say something else the next time"
    seen = replace(evidence, recipe=recipe, sample=found)
    (problem,) = [problem for _, problem in data_checks.parses(seen)]
    assert problem.level == "fail" and problem.message.startswith(f"eval data hub:{NAME}, configuration wikitext-2-raw-v1, split test: ")
    assert "validation" in problem.message and "eval_split" in problem.hint
    assert f"revision {sha[:12]}" in data_checks._summary(seen, evidence.cluster.nodes[0], evidence.facts["tower"])
    pinned = planner.pinned(items, seen)
    assert [item.hub.revision for item in pinned if item.hub] == [sha, None]
    assert run_description.digest_of(pinned[0], seen) == f"{NAME}:wikitext-2-raw-v1:train@{sha}"
