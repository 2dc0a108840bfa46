"""A recipe whose model and data lie on every node, each in its own home; and what can be wrong with one node's copy."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from homelab.lab.flaws.flaw import NotInjectable, flaw
from homelab.lab.flaws.inside import covered, inside
from homelab.lab.lab import Lab

MODEL_FOLDER, DATA_FILE = "practice/model", "practice/chats.jsonl"
ROWS = 64

RECIPE = f"""# A small model and a few chats that lie in the home of every node.
[model]
name = "~/{MODEL_FOLDER}"

[data]
train = "~/{DATA_FILE}"
format = "chat"

[method]
kind = "lora"
rank = 8
alpha = 16

[train]
global_batch = 6
steps = 10
learning_rate = 1e-3
seq_len = 128
precision = "fp32"
gradient_checkpointing = false
"""


def model_folder() -> Path:
    """The small model on this machine. Raises NotInjectable where there is none."""
    asked = os.environ.get("HOMELAB_MODEL", "~/.cache/homelab/models/smollm2-135m-instruct")
    folder = Path(asked).expanduser()
    if not (folder / "config.json").exists():
        raise NotInjectable("the small model is not on this machine", where=str(folder), hint="scripts/setup")
    return folder


def place(lab: Lab) -> Path:
    """Give every node of the lab its copy of the model (a hard link where that can be) and of the data; return the recipe's file."""
    source = model_folder()
    rows = "".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"What is {n} plus one?"},
                    {"role": "assistant", "content": f"{n + 1}."},
                ]
            }
        )
        + "\n"
        for n in range(ROWS)
    )
    for node in lab.nodes:
        folder = Path(node.home, MODEL_FOLDER)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in source.iterdir():
            try:
                os.link(file.resolve(), folder / file.name)
            except OSError:
                shutil.copyfile(file, folder / file.name)
        Path(node.home, DATA_FILE).write_text(rows)
    recipe = lab.state.node_folder(lab.nodes[0]) / "practice.toml"
    recipe.write_text(RECIPE)
    return recipe


@contextlib.contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """A private copy of `file` stands in its place, to be damaged; the file itself comes back."""
    if not file.exists():
        raise NotInjectable("the practice recipe's files are not there", where=str(file), hint="material.place(lab)")
    away = file.with_name(file.name + ".away")
    file.rename(away)
    try:
        shutil.copyfile(away, file)
        yield file
    finally:
        away.replace(file)


def _home(lab: Lab, node: str) -> Path:
    return Path(lab.state.node(node).home)


def _change_byte(file: Path, place: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte[0] ^ 1]))


@flaw("other-data", "one node's data file differs by one byte", "data.same", recipe=True)
def other_data(lab: Lab, node: str) -> Iterator[None]:
    """Same size, same number of lines: another answer to one question."""
    with replaced(_home(lab, node) / DATA_FILE) as file:
        _change_byte(file, file.read_bytes().index(b"What is 7 ") + 8)
        yield


@flaw("no-data", "one node does not have the data file", "data.there", recipe=True)
def no_data(lab: Lab, node: str) -> Iterator[None]:
    """It was copied to the others."""
    with replaced(_home(lab, node) / DATA_FILE) as file:
        file.unlink()
        yield


@flaw("cut-data", "one node's data file ends in the middle of a line", "data.same", "data.parses", recipe=True)
def cut_data(lab: Lab, node: str) -> Iterator[None]:
    """The copy was interrupted."""
    with replaced(_home(lab, node) / DATA_FILE) as file:
        os.truncate(file, file.stat().st_size // 2 + 5)
        yield


@flaw("no-model", "one node does not have the model", "model.there", recipe=True)
def no_model(lab: Lab, node: str) -> Iterator[None]:
    """The folder is somewhere else there."""
    folder = _home(lab, node) / MODEL_FOLDER
    if not folder.is_dir():
        raise NotInjectable("the practice recipe's files are not there", where=str(folder), hint="material.place(lab)")
    away = folder.rename(folder.with_name("model.away"))
    try:
        yield
    finally:
        away.rename(folder)


@flaw("no-weights", "one node's model has no weights", "model.there", "model.files", recipe=True)
def no_weights(lab: Lab, node: str) -> Iterator[None]:
    """A repository cloned without git-lfs."""
    with replaced(_home(lab, node) / MODEL_FOLDER / "model.safetensors") as file:
        file.unlink()
        yield


@flaw("other-config", "one node's model has another configuration", "model.same", recipe=True)
def other_config(lab: Lab, node: str) -> Iterator[None]:
    """Another revision of the same model."""
    with replaced(_home(lab, node) / MODEL_FOLDER / "config.json") as file:
        config = json.loads(file.read_text())
        config["rms_norm_eps"] = 1e-6
        file.write_text(json.dumps(config, indent=2))
        yield


@flaw("other-weights", "one node's weights are of another training", "model.files", recipe=True)
def other_weights(lab: Lab, node: str) -> Iterator[None]:
    """Same shapes, same size of the file, another model."""
    with replaced(_home(lab, node) / MODEL_FOLDER / "model.safetensors") as file:
        for place in range(_header_bytes(file), file.stat().st_size, 1 << 15):
            _change_byte(file, place)
        yield


@flaw("one-byte-of-weights", "one node's weights differ by one byte", "model.files", recipe=True, deep=True)
def one_byte_of_weights(lab: Lab, node: str) -> Iterator[None]:
    """A bit that fell over during the copy: same size, same date. Only who reads all of the file sees it."""
    with replaced(_home(lab, node) / MODEL_FOLDER / "model.safetensors") as file:
        _change_byte(file, file.stat().st_size // 2 + 123)
        shutil.copystat(file.with_name(file.name + ".away"), file)
        yield


def _header_bytes(file: Path) -> int:
    """Where the tensors begin: a safetensors file starts with the length of its header, in 8 bytes."""
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


@flaw("cut-weights", "one node's weights were not copied to their end", "model.files", "model.there", recipe=True)
def cut_weights(lab: Lab, node: str) -> Iterator[None]:
    """The connection broke."""
    with replaced(_home(lab, node) / MODEL_FOLDER / "model.safetensors") as file:
        os.truncate(file, file.stat().st_size // 2)
        yield


@flaw("other-tokenizer", "one node's tokenizer is another one", "model.files", "model.tokenizer", recipe=True)
def other_tokenizer(lab: Lab, node: str) -> Iterator[None]:
    """The same words become other numbers, and no error is ever seen."""
    with replaced(_home(lab, node) / MODEL_FOLDER / "tokenizer.json") as file:
        tokenizer = json.loads(file.read_text())
        tokenizer["normalizer"] = {"type": "Lowercase"}
        file.write_text(json.dumps(tokenizer))
        yield


@flaw(
    "no-chat-template", "one node's tokenizer has no chat template", "model.files", "model.chat_template", recipe=True
)
def no_chat_template(lab: Lab, node: str) -> Iterator[None]:
    """An older copy of the same model."""
    with replaced(_home(lab, node) / MODEL_FOLDER / "chat_template.jinja") as file:
        file.unlink()
        yield


@flaw("little-memory-for-model", "one node has 900 MB of memory for the model", "fit.memory", "memory.ram", recipe=True)
def little_memory_for_model(lab: Lab, node: str) -> Iterator[None]:
    """A desktop with a browser open."""
    text = inside(lab, node, "cat", "/proc/meminfo")
    text = re.sub(r"(?m)^(MemFree|MemAvailable):.*$", r"\1:         921600 kB", text)
    with covered(lab, node, "/proc/meminfo", text):
        yield
