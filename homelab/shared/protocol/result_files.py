"""What a run has made, as folders below its own on a node, and the files that may leave them: weights as safetensors or GGUF, text, and the
traces of profiles. No pickle. What a program of one's own has saved (saved/) comes as it is: files of any kind, in folders."""

from __future__ import annotations

import re
import unicodedata

from homelab.shared.protocol import layout, profile_files, window

MERGED = "merged"
EXPORTS = "exports"
GGUF = "gguf"
CARD = "README.md"
QUANTISATIONS = ("q8_0", "bf16", "f16", "q4_k_m")

_FOLDERS = re.compile(
    rf"{layout.FINAL}|{MERGED}|{EXPORTS}/step-\d{{8}}|{GGUF}-[a-z0-9_]{{2,10}}|{profile_files.PROFILES}/rank-\d{{1,6}}|{layout.SAVED}"
    rf"|{window.FOLDER}|{layout.CHECKPOINTS}/step-\d{{8,12}}"
)
_NAMES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_TEXT = (".json", ".jsonl", ".md", ".txt", ".jinja", ".model")  # .model: SentencePiece's vocabulary, a protocol buffer
_WEIGHTS = (".safetensors", ".gguf")
MODELFILE = "Modelfile"
MERGED_FROM = "merged_from.json"  # in MERGED: {"folder": of the adapter, "base": "auto" or what was asked for}
MOST_FILES = 2000
_DEEPEST = 8
MOST_TEXT_BYTES = 1 << 30
MOST_WEIGHT_BYTES = 4 << 40


def is_name(name: object) -> bool:
    """Whether a file of this name may be fetched: one path component that cannot climb, of a kind that runs no code when it is loaded."""
    return (
        isinstance(name, str)
        and _NAMES.fullmatch(name) is not None
        and (name in (MODELFILE, profile_files.TRACE) or name.endswith(_TEXT + _WEIGHTS))
    )


def is_saved_name(name: object) -> bool:
    """Whether a file below saved/ may have this path: parts that cannot climb, none of them hidden."""
    parts = name.split("/") if isinstance(name, str) else []
    return 0 < len(parts) <= _DEEPEST and all(_NAMES.fullmatch(part) for part in parts)


def may_leave(folder: str, name: object) -> bool:
    """Whether this file of a folder of results may be fetched."""
    return is_saved_name(name) if folder == layout.SAVED else is_name(name)


def most_bytes(name: str) -> int:
    """The largest size that a file of this name may have."""
    return MOST_WEIGHT_BYTES if name.endswith(_WEIGHTS) else MOST_TEXT_BYTES


def folder(text: object) -> str:
    """The folder of a result, relative to the run's. Raises ValueError for what is none."""
    if not isinstance(text, str) or _FOLDERS.fullmatch(text) is None:
        raise ValueError(f"not a folder of results: {text!r}")
    return text


def exported(step: int) -> str:
    """The folder of a checkpoint in the format of final/."""
    return f"{EXPORTS}/step-{step:08d}"


def ascii_name(run: str) -> str:
    """The name of a run in letters of ASCII alone, as files that leave a node and models of Ollama need it."""
    bare = "".join(letter for letter in unicodedata.normalize("NFKD", run) if not unicodedata.combining(letter))
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", bare)


def gguf_file(run: str, kind: str) -> str:
    """The name of a run's GGUF file."""
    return f"{ascii_name(run)}-{kind}.gguf"


def quantised(kind: str) -> str:
    """The folder of a GGUF file. Raises ValueError for another kind."""
    return folder(f"{GGUF}-{kind}")
