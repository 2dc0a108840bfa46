"""Where a part runs, and how it tells what it measures: one JSON line at once for each thing, so that nothing is lost with its process."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Place:
    """`folder` is the part's own, `device` cuda or cpu. On the CPU everything is tiny: it is only seen whether it runs."""

    def __init__(self, folder: Path, device: str, told: Path) -> None:
        self.folder = folder
        self.device = device
        self._told = told

    @property
    def is_card(self) -> bool:
        """True where figures mean something."""
        return self.device == "cuda"

    def run(self, what: str, **measured: Any) -> None:
        """A raw measurement."""
        self._tell({"run": {"what": what, **measured}})

    def figure(self, name: str, value: float) -> None:
        """A figure of the part; told again, the last one counts."""
        self._tell({"figure": name, "value": value})

    def gate(self, name: str, holds: bool) -> None:
        """What has to hold."""
        self._tell({"gate": name, "holds": bool(holds)})

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Around one of several things that a part measures: when it raises, its error is told, the gate "WHAT ran" is missed, and the part goes on."""
        try:
            yield
        except Exception as error:
            # A rank's words stand at the end of such an error, and what ended the rank stands at the end of its words.
            self.run(what, problem=f"{type(error).__name__}: {str(error)[-600:]}")
            self.gate(f"{what} ran", False)

    def _tell(self, line: dict[str, Any]) -> None:
        with self._told.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main(module: str, folder: str, device: str, told: str) -> int:
    """python -m benchmarks.gpu_parts.place MODULE FOLDER DEVICE FILE: the process of a part."""
    importlib.import_module(module).measure(Place(Path(folder), device, Path(told)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
