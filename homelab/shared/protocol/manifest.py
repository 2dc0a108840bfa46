"""A checkpoint's folder and its manifest: complete.json is written last, and nothing is loaded without it.

checkpoints/.step-00000020.<pid>.partial/   being written, or being removed
checkpoints/step-00000020/                  renamed there in one piece
checkpoints/.step-00000020.corrupt/         found damaged and put aside; the newest such folder is kept as evidence
"""

from __future__ import annotations

import glob
import os
import shutil
from typing import TYPE_CHECKING

from homelab.shared.protocol import layout
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.files import read_object

if TYPE_CHECKING:
    from homelab.shared.protocol.files import AnyPath, JsonObject

MANIFEST = "complete.json"
SCHEMA = 1


def folder_name(step: int | str) -> str:
    """step-00000020 for step 20: sorts by name as by number."""
    return f"step-{int(step):08d}"


def folder_of(run_folder: AnyPath, step: int | str) -> str:
    """Folder of the checkpoint after this optimizer step."""
    return os.path.join(run_folder, layout.CHECKPOINTS, folder_name(step))


def steps(run_folder: AnyPath) -> list[int]:
    """Steps of the checkpoints that have a manifest, rising; their contents are not read. A copy by another name does not count."""
    root = os.path.join(run_folder, layout.CHECKPOINTS)
    try:
        names = os.listdir(root)
    except OSError:
        return []
    digits = [name[5:] for name in names if name.startswith("step-")]
    return sorted(
        int(text)
        for text in digits
        if text.isascii()
        and text.isdecimal()
        and folder_name(text) == f"step-{text}"
        and os.path.exists(os.path.join(root, f"step-{text}", MANIFEST))
    )


def read(folder: AnyPath) -> JsonObject | None:
    """The manifest as far as it is a JSON object; None without one."""
    return read_object(os.path.join(folder, MANIFEST))


def digests(folder: AnyPath) -> dict[str, str]:
    """{name: sha256} of a checkpoint's files according to its manifest; {} without one."""
    parts = (read(folder) or {}).get("files")
    entries = parts.items() if isinstance(parts, dict) else ()
    return {name: part["sha256"] for name, part in entries if isinstance(part, dict) and isinstance(part.get("sha256"), str)}


def sizes(folder: AnyPath) -> dict[str, int]:
    """{name: bytes} of a checkpoint's files according to its manifest; {} without one."""
    parts = (read(folder) or {}).get("files")
    entries = parts.items() if isinstance(parts, dict) else ()
    return {name: part["bytes"] for name, part in entries if isinstance(part, dict) and isinstance(part.get("bytes"), int)}


def shards(folder: AnyPath) -> JsonObject | None:
    """{"of": parts of the whole checkpoint, "held": those in this folder}; None where its manifest names no shards.

    What cannot be understood counts as shards of which none is held: never as all of a checkpoint.
    """
    named = (read(folder) or {}).get("shards")
    if named is None:
        return None
    of, held = (named.get("of"), named.get("held")) if isinstance(named, dict) else (None, None)
    if (
        not isinstance(of, int)
        or of < 1
        or not isinstance(held, list)
        or not all(isinstance(part, int) and 0 <= part < of for part in held)
    ):
        return {"of": 1, "held": []}
    return {"of": of, "held": held}


def manifest_fault(manifest: JsonObject | None, folder: AnyPath) -> str | None:
    """None for a manifest that describes the step of its folder's name and has files, else what is wrong with it."""
    if manifest is None:
        return "no manifest"
    parts = manifest.get("files")
    if manifest.get("schema") != SCHEMA or not isinstance(manifest.get("step"), int):
        return "its manifest is not in the form of homelab"
    if not isinstance(parts, dict) or not parts or not all(isinstance(part, dict) for part in parts.values()):
        return "its manifest names no files"
    # Also while it is written, as .step-00000020.<pid>.partial.
    if os.path.basename(folder).lstrip(".").split(".")[0] != folder_name(manifest["step"]):
        return f"its manifest is of step {manifest['step']}"
    return None


def size_fault(folder: AnyPath, name: str, part: JsonObject) -> str | None:
    """None when a file of a checkpoint has the size that its manifest says, else what is wrong with it."""
    try:
        size_bytes = os.path.getsize(os.path.join(folder, name))
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None if size_bytes == part.get("bytes") else f"{name} has {size_bytes} bytes, not {part.get('bytes')}"


def fault(folder: AnyPath) -> str | None:
    """None when the checkpoint is whole (step, sizes and sha256 of all files), else what is wrong with it."""
    manifest = read(folder)
    wrong = manifest_fault(manifest, folder)
    if wrong or manifest is None:
        return wrong
    for name, part in manifest["files"].items():
        wrong = size_fault(folder, name, part)
        if wrong:
            return wrong
        try:
            if file_sha256(os.path.join(folder, name)) != part.get("sha256"):
                return f"{name} has changed since it was saved"
        except OSError as error:  # a failing disk, too: it may still return an older checkpoint
            return f"{name} cannot be read: {error.strerror or error}"
    return None


def clear_corrupt(root: AnyPath) -> None:
    """Remove the folders that were put aside as evidence."""
    for folder in glob.glob(os.path.join(glob.escape(os.fspath(root)), ".step-*.corrupt")):
        shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: AnyPath) -> str:
    """Rename a checkpoint that is not whole; the newest such is kept as evidence. Its new path. Raises OSError."""
    root, name = os.path.split(folder)
    clear_corrupt(root)
    aside = os.path.join(root, f".{name}.corrupt")
    os.replace(folder, aside)
    return aside
