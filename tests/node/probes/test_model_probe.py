"""What a node says of its base model: whole or not, digests that find a changed file, and the way to the hub (here: a listener of our own)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.facts.training import ModelFacts
from homelab.node.probes import model as probe
from homelab.node.storage import digests
from homelab.node.system import hub
from homelab.shared.protocol import model_forms

pytestmark = pytest.mark.timeout(30)
LARGE = 40 << 20  # more than what is read wholly
ENVIRONMENT = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ENDPOINT",
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "XDG_CACHE_HOME",
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and a hub that is this machine's discard port: nothing here may ask the real one."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return tmp_path


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def weights(size: int) -> bytes:
    """A safetensors file with one tensor of `size` bytes."""
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def folder(place: Path, size: int = 1000) -> Path:
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"model_type": "llama"}')
    (place / "model.safetensors").write_bytes(weights(size))
    (place / "tokenizer.json").write_text("{}")
    (place / "README.md").write_text("# a model")
    return place


def ask(name: str | Path, home: Path, **more: Any) -> ModelFacts:
    answer = probe.read({"model": str(name), "workdir": str(home / "work"), **more})
    assert json.loads(json.dumps(answer)) == answer
    return ModelFacts.model_validate(answer)


def test_a_whole_folder_has_digests_of_what_matters(home: Path) -> None:
    place = folder(home / "m")
    found = ask("~/m", home)
    assert found.found and not found.damaged and found.has_token is None and found.hub is None
    assert set(found.files) == {"model.safetensors", "tokenizer.json"}
    assert found.files["tokenizer.json"].sha256 == hashlib.sha256(b"{}").hexdigest()
    assert found.files["model.safetensors"].sampled is None, "small files are read wholly"
    (place / "tokenizer.json").write_text("[]")
    assert ask("~/m", home).files["tokenizer.json"].sha256 == hashlib.sha256(b"[]").hexdigest()


def test_samples_find_a_changed_beginning_end_and_block_and_a_full_digest_finds_one_byte(home: Path) -> None:
    place = folder(home / "m", LARGE)
    path = place / "model.safetensors"
    first = ask(place, home).files["model.safetensors"]
    assert first.sampled and first.sha256 is None
    began = time.process_time()
    assert ask(place, home).files["model.safetensors"] == first
    assert time.process_time() - began < 1.0
    content = path.read_bytes()
    size = len(content)
    step = (size - (2 << 20)) // 17
    for changed in (9, size - 1, (1 << 20) + 3 * step + 5):
        path.write_bytes(content[:changed] + b"!" + content[changed + 1 :])
        if changed > 1000:  # in the first bytes, it is the header that broke
            assert ask(place, home).files["model.safetensors"].sampled != first.sampled, changed
    path.write_bytes(content)
    whole = ask(place, home, deep=True).files["model.safetensors"]
    assert whole.sampled == first.sampled and whole.sha256 == hashlib.sha256(content).hexdigest()
    kept = ask(place, home).files["model.safetensors"]
    assert kept == whole, "computed once"
    between = (1 << 20) + step // 2
    path.write_bytes(content[:between] + b"!" + content[between + 1 :])
    os.utime(path, ns=(1, 1))
    after = ask(place, home).files["model.safetensors"]
    assert after.sampled == first.sampled and after.sha256 is None, "another file: what was kept is of no use"
    assert ask(place, home, deep=True).files["model.safetensors"].sha256 != whole.sha256


def test_a_workdir_that_cannot_be_written_costs_nothing_else(home: Path) -> None:
    (home / "work").write_text("a file")
    assert ask(folder(home / "m"), home).found
    damaged = home / "other"
    damaged.mkdir()
    (damaged / "digests.json").write_text("[1")
    assert digests.Kept(str(damaged)).of(str(home / "m" / "tokenizer.json"))["sha256"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (weights(1000)[:-1], "cut short: 1086 of 1087 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n", "pointer of Git LFS"),
    ],
)
def test_weights_that_are_not_whole_are_damaged(home: Path, content: bytes, words: str) -> None:
    place = folder(home / "m")
    (place / "model.safetensors").write_bytes(content)
    found = ask(place, home)
    assert (
        not found.found and found.damaged and words.replace("1086 of 1087", f"{len(content)} of {len(content) + 1}") in str(found.problem)
    )


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 100, struct.pack("<Q", 4) + b"null" + bytes(20), struct.pack("<Q", 9) + b'{"w": 12}']
)
def test_weights_that_nobody_understands_are_left_to_their_loader(home: Path, content: bytes) -> None:
    place = folder(home / "m")
    (place / "model.safetensors").write_bytes(content)
    assert ask(place, home).found


def test_every_part_that_the_index_names_has_to_be_there(home: Path) -> None:
    place = folder(home / "m")
    (place / "model.safetensors").rename(place / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    found = ask(place, home)
    assert not found.found and "it has no model-00002-of-00002.safetensors" in str(found.problem)
    (place / "model-00002-of-00002.safetensors").write_bytes(weights(10))
    assert set(ask(place, home).files) == {*index["weight_map"].values(), "model.safetensors.index.json", "tokenizer.json"}
    for odd in ("[]", '{"weight_map": {"a": 1, "b": "../../x"}}', "{", "null"):
        (place / "model.safetensors.index.json").write_text(odd)
        assert ask(place, home).path, odd


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["model.onnx"], "onnx"), (["onnx"], "onnx"), (["openvino_model.xml"], "onnx"), (["tf_model.h5"], "framework"), (["flax_model.msgpack"], "framework"),
        (["model_index.json"], "diffusion"), (["a-Q4_K_M.gguf"], "gguf"), (["consolidated.safetensors"], "original"), (["modules.json"], ""),
        (["model.safetensors", "model.onnx", "tf_model.h5", "a.gguf", "modules.json"], ""), (["model.safetensors", "adapter_config.json"], "adapters"),
    ],
)  # fmt: skip
def test_what_lies_in_the_place_of_weights_has_a_name_and_an_edit(home: Path, names: list[str], kind: str) -> None:
    place = folder(home / "m")
    (place / "model.safetensors").rename(home / "kept")
    for name in names:
        shutil.copy(home / "kept", place / name)
    found = ask(place, home)
    assert found.instead == kind and found.found == (kind == "" and "model.safetensors" in names)
    if kind:
        seen, edit = model_forms.HELD[kind]
        assert seen in str(found.problem) and (edit or kind in ("adapters", "gguf"))
    elif not found.found:
        assert "it has no weights" in str(found.problem)


def test_a_model_in_the_hubs_cache_is_known_by_the_digests_that_it_was_downloaded_under(home: Path) -> None:
    cache = home / ".cache/huggingface/hub/models--org--name"
    place = folder(cache / "snapshots/abc123")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("abc123")
    blob = cache / "blobs" / hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest()
    blob.parent.mkdir()
    (place / "model.safetensors").rename(blob)
    (place / "model.safetensors").symlink_to(os.path.relpath(blob, place))
    found = ask("org/name", home)
    file = found.files["model.safetensors"]
    assert found.found and file.blob == blob.name == file.sha256 and found.path == str(place)
    blob.write_bytes(weights(999) + b"!")
    assert ask("org/name", home).files["model.safetensors"].sha256 != blob.name
    blob.unlink()
    gone = ask("org/name", home)
    assert not gone.found and gone.has_token is False


def test_a_token_is_told_of_and_never_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("org/name", home).has_token is False
    assert ask("org/name", home, token_sent=True).has_token is True
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert ask("org/name", home).has_token is True and "hf_secret" not in json.dumps(
        probe.read({"model": "org/name", "workdir": "/nowhere"})
    )
    monkeypatch.delenv("HF_TOKEN")
    (home / ".cache/huggingface").mkdir(parents=True)
    (home / ".cache/huggingface/token").write_text("hf_secret")
    assert ask("org/name", home).has_token is True
    monkeypatch.setenv("HF_HOME", str(home / "elsewhere"))
    assert ask("org/name", home).has_token is False


def test_the_way_to_the_hub(home: Path, monkeypatch: pytest.MonkeyPatch, listener: int) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener}")
    assert ask("org/name", home).hub == "ok"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert ask("org/name", home).hub == "127.0.0.1:9: Connection refused"
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert ask("org/name", home).hub is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ask("org/name", home).hub == "offline"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HTTPS_PROXY")
    for odd in ("http://[::1", "nowhere", "http://127.0.0.1:99999", "http://" + "x" * 300 + ".invalid"):
        monkeypatch.setenv("HF_ENDPOINT", odd)
        assert hub.way() not in (None, "ok", "offline"), odd
    assert ask("~/nowhere", home).hub is None, "a folder is not looked for there"


def test_where_a_chat_template_may_lie(home: Path) -> None:
    place = folder(home / "m")
    assert ask(place, home).has_chat_template is False
    (place / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert ask(place, home).has_chat_template is True
    (place / "tokenizer_config.json").write_text("[]")
    assert ask(place, home).has_chat_template is False
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates/tool_use.jinja").write_text("{{ messages }}")
    assert ask(place, home).has_chat_template is True
    (place / "chat_template.jinja").write_text("{{ messages }}")
    assert "chat_template.jinja" in ask(place, home).files
    (place / "tekken.json").write_text("{}")
    assert ask(place, home).has_chat_template is None


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json", "additional_chat_templates/tool_use.jinja"]
)
def test_a_template_that_asks_for_the_time_is_seen_wherever_it_lies(home: Path, name: str) -> None:
    place = folder(home / "m")
    assert ask(place, home).template_writes_date is False
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text('{"chat_template": "{{ strftime_now(\'%d %b %Y\') }}"}')
    assert ask(place, home).template_writes_date is True
