"""Data sets of the Hugging Face hub, read by `datasets`, always at the commit that the run was launched with.

When the hub does not answer, `datasets` takes the copy that it prepared last, whatever revision was asked for
(load.py, CachedDatasetModuleFactory; packaged_modules/cache/cache.py: the newest folder). Two nodes would then train on different rows
without an error, so this module compares the commit. A data set's builder has it as its `hash` (load.py, HubDatasetModuleFactory).
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from homelab.worker.data.readers import Record
from homelab.worker.errors import WorkerError

_COMMIT = re.compile("[0-9a-f]{40}")
_MOST_WORDS = 300  # characters of an error of `datasets`


def named(source: dict[str, Any]) -> str:
    """hub:org/name and what of it, for people."""
    config = f", configuration {source['config']}" if source.get("config") else ""
    return f"hub:{source['path'].removeprefix('hub:')}{config}, split {source['split']}"


def load(source: dict[str, Any], *, node: str, run: str) -> tuple[list[Record], str]:
    """(all rows of the split, the commit they are of; empty where that is not known).

    `source` is an entry of run.json's "data": {"path", "config", "split", "revision"}. Raises WorkerError when it cannot be loaded, or
    when this node has another commit than the run was launched with.
    """
    with _told(source):
        builder = _builder(source)
        revision = str(source.get("revision") or "")
        if _COMMIT.fullmatch(revision) and builder.hash != revision:
            kept = _kept(builder, revision)
            if kept is None:
                raise _other(source, builder, revision, node, run)
            builder = kept
        builder.download_and_prepare()
        rows = builder.as_dataset(split=source["split"])
        if not len(rows):
            raise WorkerError("the data set has no rows", where=named(source), hint="each row is one sample; is it the right [data] split?")
        return list(_records(source, rows)), commit_of(builder)


def first_rows(source: dict[str, Any], most: int) -> tuple[list[Record], bool, str]:
    """(the first rows, whether these are all, the commit they are of), without downloading more than they need. Raises WorkerError."""
    with _told(source):
        builder = _builder(source)
        # A part of a split ("train[:1%]", "train+test") is loaded whole and cut then.
        stream = builder.as_streaming_dataset(split=re.split(r"[\[+]", source["split"])[0])
        rows = list(itertools.islice(_records(source, stream), most + 1))
        return rows[:most], len(rows) <= most, commit_of(builder)


def import_without_torch() -> None:
    """Import `datasets` with None in place of torch in sys.modules, and remove the None afterwards.

    `datasets` imports the modules named there when it makes the fingerprint of a data set (datasets/utils/_dill.py)."""
    with suppress(ImportError):  # the first use raises the error
        import datasets  # noqa: F401
    if sys.modules.get("torch", "") is None:
        del sys.modules["torch"]


def commit_of(builder: Any) -> str:
    """The commit of a data set; empty for one in a local folder."""
    return builder.hash if _COMMIT.fullmatch(str(builder.hash)) else ""


def _records(source: dict[str, Any], rows: Any) -> Iterator[Record]:
    place = named(source)
    for index, fields in enumerate(rows):
        yield Record(index, f"{place}, row {index + 1}", dict(fields), filled=True)


def _builder(source: dict[str, Any]) -> Any:
    try:
        from datasets import load_dataset_builder
    except ImportError as error:
        hint = "pip install datasets in the node's environment, or download the data as JSONL"
        raise WorkerError("data from the hub needs the package datasets", where=named(source), hint=hint) from error
    return load_dataset_builder(source["path"].removeprefix("hub:"), source.get("config"), revision=source.get("revision"))


def _kept(builder: Any, commit: str) -> Any:
    """The data set at that commit from this node's cache; None where the cache does not have it."""
    from datasets.packaged_modules.cache.cache import Cache

    folder = Path(builder.cache_dir).parent / commit  # .../org___name/CONFIGURATION/VERSION/COMMIT
    if not builder.repo_id or not folder.is_dir():
        return None
    return Cache(
        repo_id=builder.repo_id,
        dataset_name=builder.dataset_name,
        config_name=folder.parent.parent.name,
        version=folder.parent.name,
        hash=commit,
    )


def _other(source: dict[str, Any], builder: Any, revision: str, node: str, run: str) -> WorkerError:
    return WorkerError(
        f"{node} has revision {commit_of(builder)[:12] or 'unknown'} of this data set, and the run was launched with {revision[:12]}",
        where=f"node {node}, {named(source)}: {builder.cache_dir}",
        hint=f"the hub did not answer there, so the node can read only its old copy: let it reach the hub, then homelab recover {run}; or continue"
        " without it (--nodes); other rows are a new training: launch it as a new run",
    )


@contextmanager
def _told(source: dict[str, Any]) -> Iterator[None]:
    """An error of `datasets` as a WorkerError. It raises a dozen kinds, from ConnectionError to ValueError("Unknown split")."""
    try:
        yield
    except WorkerError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        name = source["path"].removeprefix("hub:")
        if isinstance(error, ConnectionError):
            hint = f"let this node reach https://huggingface.co, without HF_HUB_OFFLINE; or download {name} elsewhere, and name the file in [data]"
        else:
            hint = f"compare [data] train, eval, config, split, eval_split and revision with https://huggingface.co/datasets/{name}; a private or gated set needs HF_TOKEN"
        raise WorkerError(f"the data set cannot be loaded: {' '.join(lines[:2])[:_MOST_WORDS]}", where=named(source), hint=hint) from error
