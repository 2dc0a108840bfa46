"""What TAB offers: runs, nodes and recipes, from the files on this machine, and the words of an option. No node is asked, and a damaged file offers nothing."""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from homelab.cli import places

_MOST_FILES = 200  # that are read for one TAB


def runs(context: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """The runs of this machine, the newest first, with their states."""
    from homelab.controller.base.errors import HomelabError
    from homelab.controller.run import store

    folder = _given(context, "runs_dir", "HOMELAB_RUNS", places.runs)
    with contextlib.suppress(HomelabError):
        for paths in store.runs_in(folder):
            if paths.name.startswith(incomplete):
                yield paths.name, str(store.read_object(paths.state_json).get("state") or "")


def jobs(context: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """The numbers of the queue, with their recipes."""
    from homelab.controller.base.errors import HomelabError
    from homelab.controller.features.queue.queue_folder import QueueFolder

    with contextlib.suppress(HomelabError):
        for job in QueueFolder(_given(context, "runs_dir", "HOMELAB_RUNS", places.runs)).listing().jobs:
            if str(job.number).startswith(incomplete):
                yield str(job.number), f"{Path(job.recipe).name} {job.settings}".rstrip()


def nodes(context: typer.Context, incomplete: str) -> Iterator[str]:
    """The nodes of the cluster file that are not on the line yet."""
    named = [value for values in context.params.values() if isinstance(values, list | tuple) for value in values]
    yield from (name for name in _node_names(context) if name.startswith(incomplete) and name not in named)


def node_list(context: typer.Context, incomplete: str) -> Iterator[str]:
    """The same for a list with commas."""
    head, comma, last = incomplete.rpartition(",")
    named = [name.strip() for name in head.split(",")]
    yield from (f"{head}{comma}{name}" for name in _node_names(context) if name.startswith(last) and name not in named)


def recipes(context: typer.Context, incomplete: str) -> Iterator[str]:
    """The recipes in the folder that is being typed, and in the folders of it."""
    typed = os.path.dirname(incomplete)
    folder = Path(os.path.expanduser(typed or "."))
    files = sorted(folder.glob("*.toml")) + sorted(folder.glob("*/*.toml"))
    for path in islice(files, _MOST_FILES):
        shown = os.path.join(typed, path.relative_to(folder))
        tables = _toml(path) if shown.startswith(incomplete) else {}
        if "model" in tables or "script" in tables:
            yield shown


def strategies(incomplete: str) -> Iterator[str]:
    """What a recipe or `recover` may name."""
    from homelab.shared.recipe.parallel import STRATEGY_NAMES

    return _beginning(STRATEGY_NAMES, incomplete)


def supervisor_places(incomplete: str) -> Iterator[str]:
    """Where a supervisor can be left."""
    return _beginning(("here", "head"), incomplete)


def checks(incomplete: str) -> Iterator[str]:
    """What --only and --skip take: a subject, or one check of it."""
    from homelab.controller.checks import registry

    return _beginning(registry.IDS, incomplete)


def explained(incomplete: str) -> Iterator[str]:
    """What `explain` shows: the pages of the guide, the sections of the files, the keys of the section that is typed, then the topics."""
    from homelab.cli import guide
    from homelab.controller.config import reference
    from homelab.controller.diagnose import topic_index

    sections = [name for name in reference.names() if incomplete.startswith(f"{name}.")]
    keys = [f"{name}.{key.name}" for name in sections for key in reference.page(name).keys]
    return _beginning((*guide.pages(), *reference.names(), *keys, *(topic.id for topic in topic_index.TOPICS)), incomplete)


def launchers(incomplete: str) -> Iterator[str]:
    """Of `plan --launcher`."""
    from homelab.controller.launchers.registry import LAUNCHERS

    return _beginning(LAUNCHERS, incomplete)


def schedulers(incomplete: str) -> Iterator[str]:
    """Of `export --to`."""
    from homelab.controller.features.export.schedulers import SCHEDULERS

    return _beginning(SCHEDULERS, incomplete)


def quantisations(incomplete: str) -> Iterator[str]:
    """Of `gguf --quantise`."""
    from homelab.shared.protocol.result_files import QUANTISATIONS

    return _beginning(QUANTISATIONS, incomplete)


def bench_methods(incomplete: str) -> Iterator[str]:
    """Of `bench card --method`."""
    return _beginning(("lora", "qlora"), incomplete)


def _beginning(words: Iterable[str], incomplete: str) -> Iterator[str]:
    return (word for word in words if word.startswith(incomplete))


def _node_names(context: typer.Context) -> list[str]:
    entries = _toml(_given(context, "cluster", "HOMELAB_CLUSTER", places.cluster)).get("nodes")
    names = [entry.get("name") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [name for name in names if isinstance(name, str)]


def _given(context: typer.Context, option: str, variable: str, otherwise: Callable[[], Path]) -> Path:
    return Path(os.path.expanduser(context.params.get(option) or os.environ.get(variable) or otherwise()))


def _toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except (OSError, ValueError):
        return {}
