"""A recipe whose model and data lie in the home of every node, and what can be wrong with the copy of one node."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from homelab.lab.lab import Lab
from scripts.practice.misconfigurations.misconfiguration import Inject, NotInjectable, add, misconfiguration
from scripts.practice.misconfigurations.resources import free_memory

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
    setting = os.environ.get("HOMELAB_MODEL", "~/.cache/homelab/models/smollm2-135m-instruct")
    folder = Path(setting).expanduser()
    if not (folder / "config.json").exists():
        raise NotInjectable("the small model is not on this machine", where=str(folder), hint="scripts/setup")
    return folder


def place(lab: Lab) -> Path:
    """Give every node of the lab its copy of the model (a hard link where that can be) and of the data; return the recipe's file."""
    source = model_folder()
    rows = "".join(
        json.dumps({"messages": [{"role": "user", "content": f"What is {n} plus one?"}, {"role": "assistant", "content": f"{n + 1}."}]})
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
        raise NotInjectable("the practice recipe's files are not there", where=str(file), hint="training_files.place(lab)")
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


def _damaged(path: str, damage: Callable[[Path], object]) -> Inject:
    """`damage` is done to a private copy of the node's file."""

    @contextlib.contextmanager
    def inject(lab: Lab, node: str) -> Iterator[None]:
        with replaced(_home(lab, node) / path) as file:
            damage(file)
            yield

    return inject


def _change_answer(file: Path) -> None:
    """Same size, same number of lines: another answer to one question."""
    _change_byte(file, file.read_bytes().index(b"What is 7 ") + 8)


def _change_norm(file: Path) -> None:
    """Another revision of the same model."""
    config = json.loads(file.read_text())
    config["rms_norm_eps"] = 1e-6
    file.write_text(json.dumps(config, indent=2))


def _change_tokenizer(file: Path) -> None:
    """The same words become other numbers, and no error is printed."""
    tokenizer = json.loads(file.read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(tokenizer))


def _change_all_weights(file: Path) -> None:
    """Same shapes, same size of the file, another model. A safetensors file starts with the length of its header, in 8 bytes."""
    with file.open("rb") as stream:
        tensors_at = 8 + int.from_bytes(stream.read(8), "little")
    for place in range(tensors_at, file.stat().st_size, 1 << 15):
        _change_byte(file, place)


def _change_one_byte(file: Path) -> None:
    """Same size, same date: only a digest of the whole file shows it."""
    _change_byte(file, file.stat().st_size // 2 + 123)
    shutil.copystat(file.with_name(file.name + ".away"), file)


def _cut(file: Path, at: int = 0) -> None:
    """The first half of the file and `at` bytes more."""
    os.truncate(file, file.stat().st_size // 2 + at)


_WEIGHTS = f"{MODEL_FOLDER}/model.safetensors"
# name, title, the checks that find it, file, damage
DAMAGES: tuple[tuple[str, str, tuple[str, ...], str, Callable[[Path], object]], ...] = (
    ("other-data", "one node's data file differs by one byte", ("data.same",), DATA_FILE, _change_answer),
    ("no-data", "one node does not have the data file", ("data.there",), DATA_FILE, Path.unlink),
    ("cut-data", "one node's data file ends in the middle of a line", ("data.same", "data.parses"), DATA_FILE, lambda file: _cut(file, 5)),
    ("no-weights", "one node's model has no weights", ("model.there", "model.files"), _WEIGHTS, Path.unlink),
    ("other-config", "one node's model has another configuration", ("model.same",), f"{MODEL_FOLDER}/config.json", _change_norm),
    ("other-weights", "one node's weights are of another training", ("model.files",), _WEIGHTS, _change_all_weights),
    ("cut-weights", "one node's weights were not copied to their end", ("model.files", "model.there"), _WEIGHTS, _cut),
    (
        "other-tokenizer", "one node's tokenizer is another one", ("model.files", "model.tokenizer"),
        f"{MODEL_FOLDER}/tokenizer.json", _change_tokenizer,
    ),
    (
        "no-chat-template", "one node's tokenizer has no chat template", ("model.files", "model.chat_template"),
        f"{MODEL_FOLDER}/chat_template.jinja", Path.unlink,
    ),
)  # fmt: skip
for _name, _title, _checks, _path, _damage in DAMAGES:
    add(_name, _title, *_checks, inject=_damaged(_path, _damage), needs=("recipe",))

add(
    "one-byte-of-weights", "one node's weights differ by one byte", "model.files",
    inject=_damaged(_WEIGHTS, _change_one_byte), needs=("recipe", "deep"),
)  # fmt: skip
add(
    "little-memory-for-model", "one node has 900 MB of memory for the model", "fit.memory", "memory.ram",
    inject=lambda lab, node: free_memory(lab, node, 900 * 1024), needs=("recipe",),
)  # fmt: skip


@misconfiguration("no-model", "one node does not have the model", "model.there", needs=("recipe",))
def no_model(lab: Lab, node: str) -> Iterator[None]:
    """The folder has another name there."""
    folder = _home(lab, node) / MODEL_FOLDER
    if not folder.is_dir():
        raise NotInjectable("the practice recipe's files are not there", where=str(folder), hint="training_files.place(lab)")
    away = folder.rename(folder.with_name("model.away"))
    try:
        yield
    finally:
        away.rename(folder)
