"""Where the Hugging Face libraries keep what they have downloaded on this machine (huggingface_hub 2.4, constants.py and file_download.py)."""

from __future__ import annotations

import os

_MODELS = "models--"


def home() -> str:
    """The folder of these libraries."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.expanduser(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface"))


def folder() -> str:
    """The folder of downloaded repositories."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return os.path.expanduser(named) if named else os.path.join(home(), "hub")


def model_names() -> list[str]:
    """The models with a folder here, sorted. Raises OSError where there is no cache."""
    return sorted(name[len(_MODELS) :].replace("--", "/") for name in os.listdir(folder()) if name.startswith(_MODELS))


def snapshots(name: str) -> str:
    """The folder of the commits of a model, whether it is there or not."""
    return os.path.join(folder(), _MODELS + name.replace("/", "--"), "snapshots")


def reference(name: str, revision: str) -> str | None:
    """The file that says which commit a branch or a tag means here, whether it is there or not; None for what is no name of one."""
    return os.path.join(os.path.dirname(snapshots(name)), "refs", revision) if _is_name(revision) else None


def snapshot(name: str, revision: str | None) -> str | None:
    """The folder of the commit that `revision` (a branch, a tag, a commit; None: main) names here; None where the cache knows no such one."""
    commits = snapshots(name)
    if revision is not None and _is_name(revision) and os.path.isdir(os.path.join(commits, revision)):
        return os.path.join(commits, revision)
    named = reference(name, revision or "main")
    if named is None:
        return None
    try:
        with open(named, encoding="utf-8", errors="replace") as stream:
            commit = stream.read(100).strip()
    except OSError:
        return None
    return os.path.join(commits, commit) if commit and _is_name(commit) else None


def _is_name(revision: str) -> bool:
    """Whether it stays below the folder that it is looked for in (branches may have slashes)."""
    return not os.path.isabs(revision) and ".." not in revision.split("/")
