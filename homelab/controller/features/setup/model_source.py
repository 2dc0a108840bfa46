"""The base model of a recipe on this machine: a folder, or a snapshot of the hub, which is fetched where it is not here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from homelab.controller.base import links, package
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.features.setup import model_files
from homelab.controller.features.setup.setup_plan import NeededFile
from homelab.controller.run import hub_token
from homelab.shared.protocol import hub_cache
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.recipe import Model

_BLOB = re.compile(r"[0-9a-f]{64}")
_OF_THE_CACHE = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@dataclass(frozen=True)
class ModelSource:
    """`commit`: "" for a folder. `files`: what is sent, in this order, and where it lies here. `place`: what the node is told to find its folder.
    `revision`: what means the commit in the hub's cache; "" where nothing does.
    """

    name: str
    commit: str
    files: dict[NeededFile, Path]
    place: str
    revision: str = ""


def of_recipe(model: Model, say: Say) -> ModelSource:
    """The files that training reads. Raises InputError for a folder that is not here, HomelabError where the hub gives none."""
    commit = "" if model.is_folder else _fetched(model, say)
    folder = Path(model.name).expanduser() if model.is_folder else Path(hub_cache.snapshots(model.name), commit)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{model.name} is not a model folder on this machine", where=str(folder / "config.json"),
            hint=Hint("copy the model to {}, or edit the recipe: [model] name = a hub id like org/name; then: {}", str(folder), homelab("setup --recipe FILE")),
        )  # fmt: skip
    say(f"reading {model.name}")
    names = model_files.needed(path.name for path in folder.iterdir() if path.is_file())
    for path in (folder / name for name in names if model.is_folder):
        # The hub's cache is made of links by design, and weights lie on larger disks.
        if not _OF_THE_CACHE.fullmatch(path.resolve().name) and path.suffix != ".safetensors":
            links.refuse_leaving(path, folder, f"{path}, which would be sent to the nodes as a part of the model")
    revision = "" if model.is_folder else model.revision or "main"
    return ModelSource(model.name, commit, {part_of(folder / name): folder / name for name in names}, model.name, revision)


def part_of(path: Path) -> NeededFile:
    """A file as it is sent, by its own name."""
    real = path.resolve()
    # The hub's cache names large files by their sha256; small ones are named by git.
    digest = real.name if _BLOB.fullmatch(real.name) else file_sha256(real)
    return NeededFile(name=path.name, sha256=digest, size_bytes=real.stat().st_size)


def _fetched(model: Model, say: Say) -> str:
    """The commit of the snapshot that is in the hub's cache of this machine now."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise HomelabError(
            f"the hub's library, which fetches {model.name}, is not installed here", where="this machine",
            hint=package.install("huggingface_hub"),
        ) from None  # fmt: skip
    disable_progress_bars()
    say(f"fetching {model.name} from the hub, unless it is here already")
    try:
        folder = snapshot_download(
            model.name, revision=model.revision, allow_patterns=list(model_files.PATTERNS), token=hub_token.value() or None
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise HomelabError(
            f"{model.name} cannot be fetched: {str(error).splitlines()[0][:300]}", where="this machine",
            hint=Hint("check the name, and the way to the hub. A gated model needs a token: export HF_TOKEN=...; then: {}", homelab("setup --recipe FILE")),
        ) from None  # fmt: skip
    return Path(folder).name
