"""To which training a checkpoint belongs, by its manifest."""

import os

from homelab.node import files, paths


def manifest(request):
    """{"recipe_hash": the fingerprint it was saved with, None without a manifest}. `request`: workdir, run, step."""
    folder = files.checkpoint_dir(paths.run_dir(request["workdir"], request["run"]), request["step"])
    found = files.read_json(os.path.join(folder, "complete.json"))
    return {"recipe_hash": found.get("recipe_hash") if isinstance(found, dict) else None, "path": folder}
