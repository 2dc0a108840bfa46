"""Does preflight find a misconfiguration? `homelab preflight` as a process of its own, on a lab in which one thing is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from homelab.lab.lab import Lab
from scripts.practice.misconfigurations import cards, catalogue, training_files
from scripts.practice.misconfigurations.misconfiguration import Misconfiguration, NotInjectable, node_for, peer_of

LIMIT_S = 120.0
Entry = dict[str, str]


@dataclass(frozen=True)
class Seen:
    """What one preflight said. `findings` are its warnings and failures; `error` is what it printed where it gave no answer."""

    findings: tuple[Entry, ...]
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Trial:
    """One misconfiguration, tried. `why_not`: why it could not be injected. `findings`: the warnings and failures of preflight because of it."""

    misconfiguration: Misconfiguration
    node: str
    injected: bool
    why_not: str = ""
    found: bool = False
    right_node: bool = False
    hint: bool = False
    seconds: float = 0.0
    findings: tuple[Entry, ...] = ()
    error: str = ""

    @property
    def said(self) -> str:
        """The finding that names it, or the other findings."""
        ours = [entry for entry in self.findings if entry["check"] in self.misconfiguration.checks]
        return next((f"{entry['check']}: {entry['message']}" for entry in ours or self.findings), self.error or self.why_not)


def preflight(lab: Lab, recipe: Path | None = None, *, deep: bool = False) -> Seen:
    """`homelab preflight --json` on the lab's cluster file, the whole process timed."""
    words = [sys.executable, "-m", "homelab", "preflight", *([str(recipe)] if recipe else []), *(["--deep"] if deep else [])]
    # The settings of the person who runs this must have no effect.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOMELAB_")}
    environment |= {"PYTHONPATH": str(Path(__file__).resolve().parents[3]), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [*words, "--cluster", str(lab.cluster_file), "--json"], stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=LIMIT_S, check=False, cwd=lab.folder, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Seen((), LIMIT_S, f"no answer within {LIMIT_S:.0f} s")
    seconds = time.perf_counter() - began
    try:
        findings = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError, TypeError):
        return Seen((), seconds, (done.stderr or done.stdout).strip() or f"exit code {done.returncode}")
    return Seen(tuple(entry for entry in findings if entry["level"] != "ok"), seconds)


@dataclass
class Trials:
    """Misconfigurations tried one after the other on a healthy lab of two nodes or more; each is undone before the next.

    `recipe`: the file that `training_files.place` has made; without it those that need one cannot be tried.
    """

    lab: Lab
    recipe: Path | None = None
    _beside_card: dict[tuple[str, bool], set[tuple[str, str, str]]] = field(default_factory=dict)

    def run(self, one: Misconfiguration) -> Trial:
        """Inject it, run preflight, undo it."""
        node = node_for(one, self.lab)
        try:
            recipe = self._recipe_of(one)
            before = self._before(one, node)
            with catalogue.injected(self.lab, node, one):
                answer = preflight(self.lab, recipe, deep="deep" in one.needs)
        except NotInjectable as error:
            return Trial(one, node, False, f"{error.message} ({error.hint})")
        new = tuple(entry for entry in answer.findings if (entry["check"], entry["node"], entry["message"]) not in before)
        ours = [entry for entry in new if entry["check"] in one.checks]
        places = {node, "", *([peer_of(self.lab, node)] if one.where == "pair" else [])}
        return Trial(
            one, node, True, "", bool(ours), bool(new) and all(entry["node"] in places for entry in new),
            bool(ours) and all(entry["hint"] or entry["fix"] for entry in ours), answer.seconds, new, answer.error,
        )  # fmt: skip

    def _recipe_of(self, one: Misconfiguration) -> Path | None:
        if "recipe" in one.needs and self.recipe is None:
            self.recipe = training_files.place(self.lab)
        return self.recipe if "recipe" in one.needs else None

    def _before(self, one: Misconfiguration, node: str) -> set[tuple[str, str, str]]:
        """The findings without it: nothing, except about a card that torch cannot see (there is none)."""
        if "card" not in one.needs:
            return set()
        key = node, "recipe" in one.needs
        if key not in self._beside_card:
            with cards.healthy(self.lab, node):
                answer = preflight(self.lab, self._recipe_of(one))
            self._beside_card[key] = {(e["check"], e["node"], e["message"]) for e in answer.findings}
        return self._beside_card[key]
