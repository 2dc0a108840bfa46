"""A hub model that no node has is judged before a launch by its small files: the real client asks a hub on loopback, and no weight is sent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import tempfile

from homelab.node import model_build as on_node
from tests.worker import harness
from tests.worker.fake_hub import Hub

KNOWN = ["Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct"]
BIG = 40_000_000  # bytes of weights behind their head
# One process for all of them: the imports are what takes time.
ASK = """
import json, sys
from huggingface_hub import constants
from homelab.worker.tools import model_build
for question in json.load(sys.stdin):
    constants.HF_HUB_OFFLINE = False
    print(json.dumps(model_build.look(question)), flush=True)
"""
ADAPTERS = json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"})
# name on the hub: (the recipe's name, revision, topic, level, what is seen, what helps)
CASES: dict[str, tuple[str, str | None, str, str, str, str]] = {
    "a slip": ("Qwen/Qwen3-0.6", None, "hub", "fail", "the hub knows no model Qwen/Qwen3-0.6", '[model] name = "Qwen/Qwen3-0.6B"'),
    "a folder by a part of its path": ("models/mine", None, "hub", "fail", "knows no model models/mine", "a folder is named by its whole path"),
    "no name at all": ("a b/c", None, "hub", "fail", "knows no model a b/c", "org/name as on the hub"),
    "no such revision": ("org/good", "v9", "hub", "fail", 'no revision "v9"', "[model] revision"),
    "a gate": ("org/gated", None, "hub", "fail", "only to users who accepted its terms", "accept the terms at https://huggingface.co/org/gated"),
    "a bad token": ("org/refused", None, "hub", "fail", "does not accept this token", "https://huggingface.co/settings/tokens"),
    "busy": ("org/busy", None, "hub", "warn", "does not answer for org/busy now (503)", "wait a minute"),
    "a part is missing": ("org/cut", None, "hub", "fail", "names model-00002-of-00002.safetensors, but there is no such file", "[model] revision"),
    "adapters": ("org/adapters", None, "kind", "fail", "they belong to Qwen/Qwen3-0.6B", '[model] name = "Qwen/Qwen3-0.6B"'),
    "GGUF": ("org/tiny-GGUF", None, "kind", "fail", "holds GGUF files", "perhaps org/tiny"),
    "a newer type": ("org/newer", None, "kind", "fail", "does not know models of type qwen9", "homelab setup --upgrade"),
    "weights of another size": ("org/other", None, "weights", "fail", "config.json does not describe these weights", "copy the folder again"),
    "a newer tokenizer": ("org/words", None, "tokenizer", "fail", "untagged enum", "homelab setup --upgrade"),
}  # fmt: skip


def question(name: str, revision: str | None = None) -> dict[str, Any]:
    recipe = harness.resolved_recipe()
    asked = {key: recipe[key] for key in ("method", "train")}
    return {"model": name, "revision": revision, "precision": "fp32", "strategy": "ddp", "fetch": True, "known": KNOWN, **asked}


@pytest.fixture(scope="module")
def hub(model: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    files["model.safetensors"] += bytes(BIG)
    config = json.loads(files["config.json"])

    def without(*names: str) -> dict[str, bytes]:
        return {name: content for name, content in files.items() if name not in names}

    def edited(**keys: Any) -> dict[str, bytes]:
        return {**files, "config.json": json.dumps(config | keys).encode()}

    served = Hub()
    index = {
        "metadata": {},
        "weight_map": {
            "lm_head.weight": "model-00002-of-00002.safetensors",
            "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
        },
    }
    served.push("org/good", files)
    served.push("org/gated", files)
    served.gated = {"org/gated"}
    served.status = {"org/busy": 503, "org/refused": 403}
    whole = {"model-00001-of-00002.safetensors": files["model.safetensors"], "model.safetensors.index.json": json.dumps(index).encode()}
    served.push("org/cut", {**without("model.safetensors"), **whole})
    served.push("org/adapters", {"adapter_config.json": ADAPTERS, "adapter_model.safetensors": b"x"})
    served.push("org/tiny-GGUF", {"tiny-Q4_K_M.gguf": b"GGUF"})
    served.push("org/newer", edited(model_type="qwen9"))
    served.push("org/other", edited(vocab_size=249))
    words = json.loads(files["tokenizer.json"])
    words["model"]["type"] = "HyperBPE"
    served.push("org/words", {**files, "tokenizer.json": json.dumps(words).encode()})
    yield served
    served.close()


@pytest.fixture(scope="module")
def answers(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = tmp_path_factory.mktemp("cache")
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(cache),
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    asked = {"good": question("org/good"), **{case: question(*CASES[case][:2]) for case in CASES}}
    done = subprocess.run(
        [sys.executable, "-c", ASK], input=json.dumps(list(asked.values())), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(asked, map(json.loads, done.stdout.splitlines()), strict=True)) | {"sent_bytes": hub.sent_bytes}


@pytest.mark.parametrize("case", CASES)
def test_what_the_hub_says_is_a_finding_of_its_own(case: str, answers: dict[str, Any]) -> None:
    _, _, topic, level, seen, helps = CASES[case]

    (finding,) = answers[case]["findings"]

    assert (finding["topic"], finding["level"]) == (topic, level), finding
    assert seen in finding["message"] and helps in finding["hint"]


def test_a_model_on_the_hub_is_judged_as_one_in_a_folder_and_no_weight_is_sent(answers: dict[str, Any], model: Path) -> None:
    from homelab.worker.tools import model_build

    here = model_build.look({**question(str(model)), "fetch": False})
    there = answers["good"]

    assert there["findings"] == here["findings"] == []
    assert {key: there[key] for key in here} == here
    assert there["config"] == json.loads((model / "config.json").read_text()) and there["has_chat_template"] is True
    assert answers["sent_bytes"] < BIG, "of weights their heads alone"


@pytest.mark.thorough
def test_a_node_asks_the_hub_and_keeps_nothing(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb itself, with its own process: a slip is a finding whose near name lies in the cache of the node; a hub that is gone is one, too."""
    cache = tmp_path / "cache"
    (cache / "models--org--tidy").mkdir(parents=True)
    for name, value in {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", "TMPDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)
    request = {"workdir": str(tmp_path), "key": "ab" * 32, **question("org/tiddy"), "known": []}

    (slip,) = on_node.build(request)["built"]["findings"]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (gone,) = on_node.build(request)["built"]["findings"]

    assert '[model] name = "org/tidy"' in slip["hint"]
    assert "the hub cannot be reached from here" in gone["message"] and "homelab setup --recipe RECIPE" in gone["hint"]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"] and os.listdir(cache) == ["models--org--tidy"]
    shutil.rmtree(cache)
