"""The desk of a cluster of two: cluster.toml, a recipe, and runs here and on the nodes. Both nodes have two runs that have failed, the second a run that is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from homelab.controller.run import fingerprint
from homelab.shared.protocol import layout, profile_files
from tests import builders
from tests.controller.features.profile.test_fetch_profiles import summary

NAMES = ("tower", "laptop")
OTHER, DONE = "2026-01-02-0000-other", "2026-01-03-0000-done"


def write(desk: Path, workdirs: Mapping[str, Path], more: Mapping[str, str] = {}) -> None:
    """The cluster of these nodes, a recipe, its data and a script. `more`: the lines of a node that say how it is reached."""
    hosts = {name: f'host = "127.0.0.{number}"\n' for number, name in enumerate(NAMES, 2)}
    nodes = [f'[[nodes]]\nname = "{name}"\nworkdir = "{workdirs[name]}"\n{more.get(name, hosts[name])}' for name in NAMES]
    (desk / "cluster.toml").write_text("".join(nodes))
    (desk / "train.py").write_text("print(1)\n")
    (desk / "train.jsonl").write_text('{"text": "hello"}\n' * 20)
    (desk / "recipe.toml").write_text(
        '[model]\nname = "~/models/smol"\n[data]\ntrain = "train.jsonl"\n[method]\nkind = "lora"\n[train]\nsteps = 3\nglobal_batch = 12\nlearning_rate = 1e-3\n'
    )


def write_runs(desk: Path, workdirs: Mapping[str, Path]) -> str:
    """The runs here and on the nodes; the fingerprint of their recipe."""
    ranks = tuple(builders.rank_plan(number, name) for number, name in enumerate(NAMES))
    data = {"train": {"kind": "file", "sent": "on-node", "path": "/data/train.jsonl", "name": None, "sha256": "ab" * 32}, "eval": None}
    profile = {"first_step": 8, "last_step": 9, "ranks": [0, 1]}
    for run in (builders.RUN, OTHER, DONE):
        paths = builders.run_folder(
            desk / "runs",
            run,
            recipe=builders.recipe(),
            plan=builders.plan(ranks, run=run),
            data=data,
            profile=profile if run == DONE else None,
        )
        described = json.loads(paths.run_json.read_text())
        recipe_hash = str(fingerprint.fingerprint(described))
        paths.run_json.write_text(json.dumps({**described, "recipe_hash": recipe_hash}))
        for number, name in enumerate(NAMES) if run != DONE else ():
            _failed(workdirs[name] / layout.run(run), paths.run_json, paths.plan_json(1), number, name)
    _done(workdirs["laptop"] / layout.run(DONE))
    return recipe_hash


def _done(folder: Path) -> None:
    """A run that has ended well: its model, and the profile of a rank."""
    place = folder / profile_files.rank_folder(1)
    for made in (folder / layout.FINAL, place):
        made.mkdir(parents=True)
    weights = (20).to_bytes(8, "little") + b"{" + bytes(range(256)) * 8
    for name, content in {"adapter_model.safetensors": weights, "README.md": b"card", "tokenizer.json": b"{}"}.items():
        (folder / layout.FINAL / name).write_bytes(content)
    (place / profile_files.SUMMARY).write_text(json.dumps(summary(1, run=DONE)))


def _failed(folder: Path, run_json: Path, plan: Path, number: int, name: str) -> None:
    place, rank = folder / layout.node(1, name), folder / layout.rank(1, number)
    for made in (place, rank):
        made.mkdir(parents=True)
    (folder / "run.json").write_bytes(run_json.read_bytes())
    (folder / layout.plan_json(1)).write_bytes(plan.read_bytes())
    (place / "start.json").write_text(json.dumps({"command": [], "attempt": 1, "run": builders.RUN}))
    (place / "exit.json").write_text(json.dumps({"returncode": 1, "ended_at": 2000.0}))
    (place / "err.log").write_text("Traceback\nRuntimeError: CUDA out of memory\n")
    (rank / "heartbeat.json").write_text(json.dumps({"time": 1500.0, "phase": "training", "step": 7, "total_steps": 10, "pid": 4}))
    line = {"kind": "train", "time": 1500.0, "attempt": 1, "rank": number, "node": name, "step": 7, "loss": 1.0, "tokens": 5, "step_s": 1.0}
    (rank / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (rank / "error.json").write_text(json.dumps({"message": "out of memory", "where": "here", "hint": "less"}))
