"""The page of `homelab web` in headless Chromium, at 390, 800 and 1600 pixels, light and dark, with axe-core.

serious_findings         of axe-core, serious or critical, over all pages
console_errors           errors and warnings in the browser's console, and failures of the script
requests_elsewhere       requests to any other host
long_run_shown_s         from the address to the drawn loss of 100,000 steps on eight nodes, the slowest of all
long_run_cpu_s           processor time of homelab for one page of that run, on average
chat_wrong               of conversations held by the keyboard: a focus, a line or a turn that was not as it should be
acts_wrong               of dialogs that ask before a command runs, by the keyboard: a focus, a word or an end that was not as it should be
chat_left                programs of the model on the node 10 s after the last page left in the middle of an answer
chat_first_word_s        from Enter to the first word of an answer, the slowest of all; the model's words are played

The runs: one with a kill and a recovery (tests/fixtures/older_runs), with hostile words in its events and answers, and a long one; and one whose
node is this machine, where a program says hostile words in place of its model (scripts/practice/played_model.py). It needs
chromium, node and npm: playwright-core and axe-core are fetched into a temporary folder. SHOTS=FOLDER keeps pictures.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from benchmarks import report

from scripts.practice import played_model

_ROOT = Path(__file__).parents[2]
_FIXTURES = _ROOT / "tests" / "fixtures" / "older_runs" / "controller"
_DONE, _FAILED, _LONG = "2026-11-26-0158-demo", "2026-11-26-0157-alone", "2026-11-26-0200-long"
_STEPS, _NODES = 100_000, 8
_PACKAGES = ("playwright-core@1.65.1", "axe-core@4.14.1")
_EVIL = "<img src=x onerror=window.hit=1>"
_LINE = (
    '{"attempt": 1, "communication_s": 0.0671873169, "compute_s": 0.0714671500, "epoch": %.4f, "grad_norm": 0.8449187874, "input_s": 0.0001, "kind": "train", '
    '"learning_rate": 0.0001, "loss": %.6f, "memory_bytes": 7516192768, "node": "node%d", "perplexity": 257.31, "rank": %d, "samples": 4, "share": 4, '
    '"step": %d, "step_s": 4.0, "time": %d.5, "tokens": 2048, "tokens_per_s": 512.3}\n'
)


def main() -> int:
    """Returns 0 where no page has an error, a request elsewhere, a serious finding or a hostile word that is more than text."""
    options = report.arguments(__doc__ or "")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or not shutil.which("npm"):
        raise SystemExit("error: there is no chromium, node or npm on this machine\nfix:   sudo apt install chromium nodejs npm")
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    try:
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", folder, *_PACKAGES], check=True
        )
        _runs(folder / "runs")
        pages = _seen(chromium, folder, "/", f"/runs/{_DONE}", f"/runs/{_FAILED}")
        acts = _seen(chromium, folder, f"/runs/{_FAILED}#ask", f"/runs/{_FAILED}#act")
        long = _seen(chromium, folder, f"/runs/{_LONG}")
        (folder / "chat").mkdir()
        environment = played_model.played(folder / "chat", loading_s=1.5)
        talks = _seen(chromium, folder / "chat", f"/runs/{_DONE}#chat", packages=folder, environment=environment)
        ends_s = time.monotonic() + 10
        while (left := played_model.left(folder)) and time.monotonic() < ends_s:
            time.sleep(0.1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seen = [*pages, *acts, *long, *talks]
    serious = [finding for page in seen for finding in page["axe"] if finding["impact"] in ("serious", "critical")]
    figures = {
        "pages": float(len(seen)), "serious_findings": float(len(serious)), "console_errors": float(sum(len(page["errors"]) for page in seen)),
        "requests_elsewhere": float(sum(len(page["elsewhere"]) for page in seen)), "too_wide": float(sum(page["is_too_wide"] for page in seen)),
        "hostile_words_run": float(sum(page["hit"] for page in seen)), "long_run_shown_s": max(page["shown_s"] for page in long),
        "long_run_cpu_s": max(page["cpu_s"] for page in long), "chat_wrong": float(sum(len(page["wrong"]) for page in talks)), "chat_left": float(len(left)),
        "acts_wrong": float(sum(len(page["wrong"]) for page in acts)),
        "chat_first_word_s": max(page["first_word_s"] for page in talks),
    }  # fmt: skip
    rows = [
        (
            f"{page['path']} {page['width']} {page['scheme']}",
            f"{page['shown_s']:.1f} s {page['errors'] or ''} {page['axe'] or ''} {page.get('wrong') or ''}",
        )
        for page in seen
    ]
    report.finish("web", figures, seen, rows, options.json)
    are_shown = all(page["hostile_texts"] for page in (*pages, *talks) if _DONE in page["path"])
    faults = (
        "serious_findings",
        "console_errors",
        "requests_elsewhere",
        "too_wide",
        "hostile_words_run",
        "chat_wrong",
        "chat_left",
        "acts_wrong",
    )
    return 0 if are_shown and not any(figures[name] for name in faults) else 1


def _runs(folder: Path) -> None:
    """The recorded runs with hostile words, and the long one; their nodes are off."""
    shutil.copytree(_FIXTURES, folder)
    with (folder / _DONE / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"time": time.time(), "event": "note", "text": _EVIL, "what": _EVIL}) + "\n")
    with (folder / _DONE / "answers.jsonl").open("a") as stream:
        stream.writelines(json.dumps({"prompt": _EVIL, "base": base, "answer": _EVIL}) + "\n" for base in (True, False))
    shutil.copytree(_FIXTURES / _DONE, folder / _LONG)
    for file in (folder / _LONG).rglob("*.json"):
        file.write_text(file.read_text().replace(_DONE, _LONG))
    began = int(time.time()) - 4 * _STEPS
    with (folder / _LONG / "metrics.jsonl").open("w") as stream:
        for step in range(1, _STEPS + 1):
            loss = 2.0 + 3000 / (1000 + step) + 0.05 * (step % 7)
            stream.writelines(_LINE % (step / 5000, loss, rank + 1, rank, step, began + 4 * step) for rank in range(_NODES))
    nodes = "".join(f'[[nodes]]\nname = "node{number}"\nhost = "127.0.0.{number}"\nport = 1\n' for number in range(1, _NODES + 1))
    (folder.parent / "cluster.toml").write_text(nodes)


def _seen(
    chromium: str, folder: Path, *paths: str, packages: Path | None = None, environment: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """What the browser has seen of each page; `cpu_s`: of the server, for each of them. `packages`: where the browser's are, if not in `folder`."""
    with _served(folder, environment) as (address, server):
        before = sum(server.cpu_times()[:2])
        program = ["node", str(Path(__file__).with_name("web_browser.mjs")), chromium, str(packages or folder), address, *paths]
        said = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, timeout=1200).stdout
        pages: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines()]
        used = sum(server.cpu_times()[:2]) - before
    return [{**page, "cpu_s": used / len(pages)} for page in pages]


@contextmanager
def _served(folder: Path, environment: dict[str, str] | None) -> Iterator[tuple[str, psutil.Process]]:
    words = ["web", "--port", "0", "--cluster", str(folder / "cluster.toml"), "--runs-dir", str(folder / "runs")]
    environment = environment or {name: value for name, value in os.environ.items() if not name.startswith("HOMELAB_")}
    with subprocess.Popen([sys.executable, "-m", "homelab", *words], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
