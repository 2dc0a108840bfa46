"""Does preflight find a flaw? `homelab preflight` as a process of its own, on a lab in which one thing is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from homelab.lab.flaws import cards, material
from homelab.lab.flaws.flaw import Flaw, NotInjectable, blamed, node_for
from homelab.lab.lab import Lab

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
    """One flaw, tried. `why_not`: why it could not be injected. `findings`: what preflight warned of or failed on because of it."""

    flaw: Flaw
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
        """The finding that names the flaw, or whatever was said instead."""
        ours = [entry for entry in self.findings if entry["check"] in self.flaw.checks]
        return next(
            (f"{entry['check']}: {entry['message']}" for entry in ours or self.findings), self.error or self.why_not
        )


def preflight(lab: Lab, recipe: Path | None = None, *, deep: bool = False) -> Seen:
    """`homelab preflight --json` on the lab's cluster file, the whole process timed."""
    words = [
        sys.executable,
        "-m",
        "homelab",
        "preflight",
        *([str(recipe)] if recipe else []),
        *(["--deep"] if deep else []),
    ]
    # The controller has no part in what is wrong with a node, and no settings of whoever runs this.
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
    """Flaws tried one after the other on a healthy lab of two nodes or more; each is undone before the next.

    `recipe`: the file that `material.place` has made; without it flaws that need one cannot be tried.
    """

    lab: Lab
    recipe: Path | None = None
    _beside_card: dict[tuple[str, bool], set[tuple[str, str, str]]] = field(default_factory=dict)

    def run(self, flaw: Flaw) -> Trial:
        """Inject, look, undo."""
        node = node_for(flaw, self.lab)
        try:
            recipe = self._recipe_of(flaw)
            known = self._before(flaw, node)
            with contextlib.ExitStack() as stack:
                if flaw.card:
                    stack.enter_context(cards.healthy(self.lab, node))
                stack.enter_context(flaw.inject(self.lab, node))
                seen = preflight(self.lab, recipe, deep=flaw.deep)
        except NotInjectable as error:
            return Trial(flaw, node, False, f"{error.message} ({error.hint})")
        new = tuple(entry for entry in seen.findings if (entry["check"], entry["node"], entry["message"]) not in known)
        ours = [entry for entry in new if entry["check"] in flaw.checks]
        places = blamed(flaw, self.lab, node)
        return Trial(
            flaw, node, True, "", bool(ours), bool(new) and all(entry["node"] in places | {""} for entry in new),
            bool(ours) and all(entry["hint"] or entry["fix"] for entry in ours), seen.seconds, new, seen.error,
        )  # fmt: skip

    def _recipe_of(self, flaw: Flaw) -> Path | None:
        if flaw.recipe and self.recipe is None:
            self.recipe = material.place(self.lab)
        return self.recipe if flaw.recipe else None

    def _before(self, flaw: Flaw, node: str) -> set[tuple[str, str, str]]:
        """What is found without the flaw: nothing, but for a card that torch cannot see (there is none)."""
        if not flaw.card:
            return set()
        if (node, flaw.recipe) not in self._beside_card:
            with cards.healthy(self.lab, node):
                seen = preflight(self.lab, self._recipe_of(flaw))
            self._beside_card[node, flaw.recipe] = {(e["check"], e["node"], e["message"]) for e in seen.findings}
        return self._beside_card[node, flaw.recipe]
