"""A run on this machine as its only node, and the program that answers for its model: the real one, or one that says what a test wants at once.

`left(folder)` are the programs of its conversations that run now.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from homelab.lab import Lab, procfs

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "tests" / "fixtures" / "older_runs"
RUN = "2026-11-26-0158-demo"
WORDS = "it says: <img src=x onerror=window.hit=1> \x1b[31m"
# Python imports this before the program that it was asked for (docs.python.org/3/library/site.html), and here in its place.
_PLAYED = """
import json, os, sys, threading, time
if "homelab.worker.tools.conversation" in sys.orig_argv:
    def say(message):
        print(json.dumps(message), flush=True)
    stopped, questions, asked = threading.Event(), [], threading.Semaphore(0)
    def listen():
        for line in sys.stdin:
            question = json.loads(line)
            if question.get("stop"):
                stopped.set()
            else:
                stopped.clear()
                questions.append(question)
                asked.release()
        os._exit(0)
    threading.Thread(target=listen, daemon=True).start()
    say({"loading": "it needs about 0.30 GB; RAM has 8.00 GB free"})
    time.sleep(float(os.environ.get("PLAYED_LOADING_S", "0.3")))
    say({"ready": {"notes": []}})
    while True:
        asked.acquire()
        question = questions.pop(0)
        words = %r.split(" ") + ["word"] * 4000
        for number, word in enumerate(words[:question["max_new_tokens"]]):
            if stopped.is_set():
                break
            say({"piece": word + " "})
            time.sleep(0.02)
        say({"end": {"tokens": number, "stopped": stopped.is_set()}})
"""


def make(folder: Path, model: str = "/nowhere/model") -> dict[str, str]:
    """The run with its base model at `model`, and cluster.toml, in `folder`; the environment for commands that use them."""
    shutil.copytree(FIXTURES / "controller" / RUN, folder / "runs" / RUN)
    shutil.copytree(FIXTURES / "nodes" / "node1" / "runs" / RUN, folder / "node1" / "runs" / RUN)
    for file in (folder / "runs" / RUN / "run.json", folder / "node1" / "runs" / RUN / "run.json"):
        described = json.loads(file.read_text(encoding="utf-8"))
        described["recipe"]["model"]["name"] = model
        file.write_text(json.dumps(described), encoding="utf-8")
    node = f'[[nodes]]\nname = "node1"\nhost = "local"\nworkdir = "{folder / "node1"}"\npython = "{sys.executable}"\n'
    (folder / "cluster.toml").write_text(node, encoding="utf-8")
    own = {"HOMELAB_CLUSTER": str(folder / "cluster.toml"), "HOMELAB_RUNS": str(folder / "runs"), "CUDA_VISIBLE_DEVICES": ""}
    return {key: value for key, value in os.environ.items() if not key.startswith("HOMELAB_")} | own | {"PYTHONPATH": str(REPOSITORY)}


def played(folder: Path, *, loading_s: float = 0.3, lab: Lab | None = None) -> dict[str, str]:
    """The same, with a program that says WORDS in place of the model. `lab`: its node1, which is reached by SSH, is the node."""
    environment = make(folder)
    (folder / "played").mkdir()
    (folder / "played" / "sitecustomize.py").write_text(_PLAYED % WORDS, encoding="utf-8")
    python = folder / "played" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder / "played"}:$PYTHONPATH" exec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    cluster = folder / "cluster.toml"
    if lab is not None:
        cluster = lab.cluster_file
        shutil.copytree(folder / "node1" / "runs", Path(lab.state.node("node1").workdir) / "runs")
        environment["HOMELAB_CLUSTER"] = str(cluster)
    cluster.write_text(cluster.read_text(encoding="utf-8").replace(sys.executable, str(python)), encoding="utf-8")
    return environment | {"PLAYED_LOADING_S": str(loading_s)}


def left(folder: Path) -> list[int]:
    """Their process ids."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = procfs.command_line(int(entry.name))
            if "homelab.worker.tools.conversation" in words and any(str(folder) in word for word in words):
                found.append(int(entry.name))
    return found
