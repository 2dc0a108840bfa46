"""To which training a checkpoint belongs, by its manifest."""

import os

from homelab.node import files, paths


def manifest(request):
    """{"recipe_hash": the fingerprint it was saved with, None without a manifest; "files": {name: sha256}}. `request`: workdir, run, step."""
    folder = files.checkpoint_dir(paths.run_dir(request["workdir"], request["run"]), request["step"])
    found = files.read_object(os.path.join(folder, "complete.json")) or {}
    return {"recipe_hash": found.get("recipe_hash"), "path": folder, "files": digests(folder)}


def digests(folder):
    """{name: sha256} of a checkpoint's files, as its manifest has them; {} without one."""
    found = files.read_object(os.path.join(folder, "complete.json")) or {}
    parts = found.get("files")
    entries = parts.items() if isinstance(parts, dict) else ()
    return {name: part["sha256"] for name, part in entries if isinstance(part, dict) and isinstance(part.get("sha256"), str)}
