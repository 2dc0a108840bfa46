"""How every benchmark reports: a table for people, and one JSON shape for programs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def arguments(description: str) -> argparse.Namespace:
    """The arguments every benchmark takes: --json FILE and --repeats N."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and raw measurements here")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of A B A B ... (at least 3 for a figure)")
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def spread(values: list[float]) -> str:
    """Median and range as text."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def finish(name: str, figures: dict[str, float], runs: list[dict[str, Any]], rows: list[tuple[str, str]], file: Path | None) -> None:
    """Print the table; write the JSON when a file is asked for."""
    table = Table(box=None, pad_edge=False, title=name, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("median (lowest to highest)", justify="right")
    for label, text in rows:
        table.add_row(label, text)
    for label, value in figures.items():
        table.add_row(label, f"{value:.3f}", style="bold")
    Console().print(table)
    if file is not None:
        document = {"figures": figures, "runs": runs, "machine": machine(), "command": " ".join(sys.argv), "time": time.time()}
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
