"""The folder of a benchmark: what is done stays done, whatever happens to this process or to a node.

recipes/<cell>.toml             the recipe of each cell, as it is launched
results/<cell>.<repeat>.json    one file for each run that is over
runs/                           the run folders
results.csv, report.html, charts/
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError

from homelab.controller.attempt import begun_adapter
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.features.bench.cell import Cell
from homelab.controller.features.bench.result import Result
from homelab.controller.run import store


class BenchmarkFolder:
    """The files of one suite."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = root / "runs"
        self.csv = root / "results.csv"
        self.page = root / "report.html"
        self.charts = root / "charts"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only one benchmark at a time writes here. Raises HomelabError."""
        with store.disk_errors_as_hints(self.root):
            self.runs.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HomelabError(
                    "another homelab bench is working in this folder",
                    where=str(self.root),
                    hint="wait for it, or name another folder with --output",
                ) from None
            yield
        finally:
            os.close(descriptor)

    def keep_to(self, suite: Mapping[str, Any]) -> None:
        """Refuse a suite that has changed since: its results would be compared with those of another one. Raises InputError."""
        file = self.root / "suite.json"
        kept = store.read_object(file)
        if kept and kept != suite:
            changed = ", ".join(key for key in suite if kept.get(key) != suite[key])
            raise InputError(
                f"the suite, its recipe or the cluster has changed since the results here were measured: {changed}", where=str(self.root),
                hint="name another folder with --output, or remove this one",
            )  # fmt: skip
        if not kept:
            store.write_json(file, suite)

    def recipe(self, cell: Cell, content: Mapping[str, Any], beside: Path) -> Path:
        """Write the recipe of a cell. Files that it names relative to `beside` are found from where it lies now."""
        file = self.root / "recipes" / f"{cell.file_stem}.toml"
        data = {key: _moved(value, beside, file.parent) if key == "train" else value for key, value in dict(content["data"]).items()}
        strategy = {} if len(cell.nodes) == 1 and cell.strategy == "alone" else {"strategy": cell.strategy}
        model = dict(content["model"])
        if model.get("adapter") and (adapter := begun_adapter.folder_of(model["adapter"], beside.resolve())) is not None:
            model["adapter"] = str(adapter.resolve())
        parallel = {key: value for key, value in dict(content.get("parallel", {})).items() if key != "strategy"} | strategy
        store.write_text(file, tomlkit.dumps(dict(content) | {"model": model, "data": data, "parallel": parallel}))
        return file

    def result_file(self, cell: Cell, repeat: int) -> Path:
        """Where the result of this run is kept."""
        return self.root / "results" / f"{cell.file_stem}.{repeat}.json"

    def results(self) -> list[Result]:
        """All that is there, by the names of the files. A file that is not whole counts as not there."""
        found = []
        for file in sorted((self.root / "results").glob("*.json")):
            try:
                found.append(Result.model_validate(store.read_object(file)))
            except ValidationError:
                continue
        return found


def _moved(path: Any, beside: Path, folder: Path) -> Any:
    if not isinstance(path, str) or path.startswith(("/", "~", "hub:")):
        return path
    return os.path.relpath((beside / path).resolve(), folder.resolve())
