"""runs: nothing else of ours trains here already."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks.commands import answered, listed
from homelab.checks.evidence import Evidence, Finding
from homelab.planning.command import quote_words

ID = "runs"


def judge(evidence: Evidence) -> Iterator[Finding]:
    """A live run: fail where it holds GPUs (two runs do not fit), warn on a CPU node (both only become slower)."""
    for node, facts in answered(evidence):
        if not facts.runs_alive:
            yield Finding(ID, node.name, "ok", "no run is alive")
            continue
        several = len(facts.runs_alive) > 1
        message = f"{'runs' if several else 'run'} {listed(facts.runs_alive)} {'are' if several else 'is'} alive here"
        hint = " && ".join(quote_words(["homelab", "stop", run]) for run in facts.runs_alive)
        yield Finding(ID, node.name, "fail" if node.gpus else "warn", message, hint)
