"""Where cluster.toml and the runs are if nobody says it: in this folder, in a folder above, or among the person's own files."""

from __future__ import annotations

import os
from pathlib import Path

import typer

CLUSTER, RUNS = Path("cluster.toml"), Path("runs")


def cluster() -> Path:
    """cluster.toml of this folder, of the nearest folder above that has one, or of ~/.config/homelab. Where none of them is, that of this folder."""
    if CLUSTER.exists():
        return CLUSTER
    above = (folder / CLUSTER for folder in Path.cwd().parents)
    return next((file for file in (*above, _own_cluster()) if _is_trusted(file)), CLUSTER)


def runs() -> Path:
    """The runs beside the cluster.toml that was found; of the one in ~/.config/homelab, those of this folder if it has some, else ~/.local/share/homelab/runs."""
    found = cluster()
    if os.environ.get("HOMELAB_CLUSTER") or found == CLUSTER or RUNS.is_dir():
        return RUNS
    return _home("XDG_DATA_HOME", ".local/share") / RUNS if found == _own_cluster() else found.parent / RUNS


def cluster_option(context: typer.Context, value: Path) -> Path:
    """The callback of --cluster: as it was given, else as it was found."""
    return value if _is_given(context, "cluster") else cluster()


def runs_option(context: typer.Context, value: Path) -> Path:
    """The callback of --runs-dir: as it was given, else as it was found. With a --cluster of its own, the runs are in this folder."""
    return value if _is_given(context, "runs_dir") or _is_given(context, "cluster") else runs()


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _own_cluster() -> Path:
    return _home("XDG_CONFIG_HOME", ".config") / CLUSTER


def _home(variable: str, otherwise: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / otherwise) / "homelab"


def _is_trusted(file: Path) -> bool:
    """Whether it is there, and this person's or root's: in a folder that others may write to, such as /tmp, it would be somebody's trap."""
    try:
        # A link, too: somebody's may lead to a file of this person that is about other machines.
        return file.is_file() and {file.lstat().st_uid, file.stat().st_uid} <= {os.getuid(), 0}
    except OSError:
        return False
