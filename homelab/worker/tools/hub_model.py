"""A model of the hub that this node does not have: its small files, and what the heads of its weight files say. No weight is fetched.

Everything is bounded (files, bytes, seconds) and goes into the hub's cache that HF_HUB_CACHE names, which the caller throws away. Names the hub does not
know, gates and a hub that does not answer are each an error of its own.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from homelab.worker.errors import WorkerError
from homelab.worker.model import base_kind

_SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_MOST_FILES, _MOST_BYTES, _MOST_HEADS = 40, 160_000_000, 12
_LIMIT_S, _SILENT_S = 60.0, 10.0
_HEAD_BYTES = 64 << 20  # a safetensors header describes tensors; the largest have a few MB
_AGAIN = "wait a minute, then: homelab preflight RECIPE; homelab setup --recipe RECIPE fetches the model on this machine and sends it to the nodes"
_OF_A_NETWORK = ("httpx", "httpx2", "httpcore", "requests", "urllib3")


class HubError(WorkerError):
    """The hub does not give this model. `level`: "warn" where waiting may help."""

    def __init__(self, message: str, *, hint: str, level: str = "fail") -> None:
        super().__init__(message, where=base_kind.WHERE, hint=hint)
        self.level = level


@dataclass(frozen=True)
class Repository:
    """`names`: its files, `folder`: those that were fetched; `sizes`: tensors whose size a head told; `tensors`: all that the weights hold, as far as known."""

    commit: str
    names: tuple[str, ...]
    folder: Path
    sizes: dict[str, tuple[int, ...]]
    tensors: frozenset[str]


def fetch(name: str, revision: str | None, known: Sequence[str]) -> Repository:
    """The repository `name` at `revision`. `known`: names that a person may have meant. Raises WorkerError."""
    from huggingface_hub import HfApi, hf_hub_download

    end_s = time.monotonic() + _LIMIT_S
    with _told(name, revision, known):
        found = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_SILENT_S)
        sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
        folder = Path()
        for file in _small(sizes):
            if time.monotonic() > end_s:
                raise HubError(
                    f"the hub sent the small files of {name} too slowly: not all within {_LIMIT_S:.0f} s", hint=_AGAIN, level="warn"
                )
            folder = Path(hf_hub_download(name, file, revision=found.sha)).parent
        index = _index(folder, sizes)
        heads: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(index.values()) or {each for each in sizes if fnmatch.fnmatchcase(each, "model*.safetensors")})[
            :_MOST_HEADS
        ]:
            if file in sizes and time.monotonic() < end_s:
                heads |= _head(name, file, str(found.sha))
    missing = sorted(set(index.values()) - set(sizes))
    if missing:
        raise HubError(
            f"{name} on the hub is not complete: its index of the weights names {missing[0]}, but there is no such file",
            hint=f"edit the recipe: [model] revision = an older one (https://huggingface.co/{name}/commits/main), or another model",
        )  # fmt: skip
    return Repository(str(found.sha), tuple(sorted(sizes)), folder, heads, frozenset(index) or frozenset(heads))


def _small(sizes: dict[str, int]) -> list[str]:
    """The files that are fetched, config.json first, while there is room for them."""
    chosen: list[str] = []
    left = _MOST_BYTES
    for file in sorted(sizes, key=lambda file: (file not in ("config.json", "adapter_config.json"), sizes[file])):
        if (
            "/" not in file
            and any(fnmatch.fnmatchcase(file, pattern) for pattern in _SMALL)
            and sizes[file] <= left
            and len(chosen) < _MOST_FILES
        ):
            chosen.append(file)
            left -= sizes[file]
    return chosen


def _index(folder: Path, sizes: dict[str, int]) -> dict[str, str]:
    """Tensor -> file, of safetensors in several files; nothing where one file holds them all."""
    if "model.safetensors" in sizes or not (folder / "model.safetensors.index.json").is_file():
        return {}
    try:
        said = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # the load says so
        return {}
    parts = said.get("weight_map") if isinstance(said, dict) else None
    return {str(tensor): str(file) for tensor, file in parts.items()} if isinstance(parts, dict) else {}


def _head(name: str, file: str, commit: str) -> dict[str, tuple[int, ...]]:
    """Tensor -> size by the head of a safetensors file; nothing where it has none. Reads that and closes the connection."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    content = b""
    with get_session().stream(
        "GET", hf_hub_url(name, file, revision=commit), headers=build_hf_headers(), timeout=_SILENT_S, follow_redirects=True
    ) as response:
        hf_raise_for_status(response)
        for part in response.iter_bytes():
            content += part
            wanted = 8 + int.from_bytes(content[:8], "little")
            if len(content) >= 8 and (len(content) >= wanted or wanted > _HEAD_BYTES):
                break
    try:
        said = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return {tensor: tuple(map(int, entry["shape"])) for tensor, entry in said.items() if tensor != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError):  # no safetensors: the load says so
        return {}


@contextmanager
def _told(name: str, revision: str | None, known: Sequence[str]) -> Iterator[None]:
    """What the hub or the way to it says, in three parts."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{name}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"the hub gives {name} only to users who accepted its terms ({_first(error)})",
            hint=f"accept the terms at {page}, make a token at https://huggingface.co/settings/tokens, then, on this machine: export HF_TOKEN=... (a launch sends it to the nodes)",
        ) from error  # fmt: skip
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        near = difflib.get_close_matches(name.lower(), {each.lower() for each in known}, n=1, cutoff=0.75)
        meant = next(
            (f'[model] name = "{each}" (did you mean it?)' for each in known if near and each.lower() == near[0]),
            "[model] name = org/name as on the hub",
        )
        raise HubError(
            f"the hub knows no model {name}, or it is private",
            hint=f"edit the recipe: {meant}; a folder is named by its whole path (/... or ~/...); a private model needs, on this machine: export HF_TOKEN=...",
        ) from error  # fmt: skip
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f'the hub knows {name}, but no revision "{revision}" of it',
            hint=f"edit the recipe: [model] revision = a branch, tag or commit of {page}/commits/main, or leave it out",
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            again = "make a new one at https://huggingface.co/settings/tokens, then, on this machine: export HF_TOKEN=..."
            raise HubError(f"the hub does not accept this token for {name} ({_first(error)})", hint=again) from error
        raise HubError(f"the hub does not answer for {name} now ({status or _first(error)})", hint=_AGAIN, level="warn") from error
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in _OF_A_NETWORK:
            raise
        raise HubError(
            f"{name} is not in the cache of this node, and the hub cannot be reached from here ({_first(error)})",
            hint="homelab setup --recipe RECIPE fetches it on this machine and sends it to the nodes; or connect this node to the internet",
        ) from error  # fmt: skip


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200]
