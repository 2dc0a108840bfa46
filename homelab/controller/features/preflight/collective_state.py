"""The state of a collective smoke test: computed from the lines of its nodes and the time. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from homelab.controller.facts.collective_check import RankState
from homelab.shared.protocol.collective_messages import CollectiveLine
from homelab.shared.protocol.collective_stages import DONE, IMPORTING, STAGES, STARTING

LIMIT_S = 60.0  # from the start, or from when the last rank had imported torch
IMPORT_LIMIT_S = 180.0  # a node limited to 0.2 core takes 15 s per process
SILENT_S = 20.0  # the agent says something every second
# How long is waited for the culprit's own words when others have only lost a peer; and for those of others at all.
_ECHO_S, _SETTLE_S = 5.0, 0.3
_NAMED_AFTER_S = 4.0
_ECHO = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|[Tt]im(?:ed|e) ?out|DistNetworkError|DistStoreError|remote process exited|NCCL communicator was aborted|socket"
)


@dataclass(frozen=True)
class CollectiveOutcome:
    """How it ended: "done", "failed" (`error` of `node`, "" when of nobody alone) or "stuck" (`missing` has who is waited for)."""

    kind: Literal["done", "failed", "stuck"]
    error: str = ""
    node: str = ""
    missing: tuple[RankState, ...] = ()


@dataclass(frozen=True)
class _Trouble:
    at: float
    node: str
    text: str
    is_echo: bool


class CollectiveTestState:
    """`ranks` are the numbers of each node's ranks; all times are `time.monotonic()` of one clock."""

    def __init__(self, ranks: Mapping[str, tuple[int, ...]], now: float) -> None:
        self._ranks = dict(ranks)
        self._started = self._imported = now
        self._heard = dict.fromkeys(ranks, now)
        self._phases = dict.fromkeys(ranks, STARTING)
        self._stages: dict[int, str] = {}
        self._results: dict[int, tuple[dict[str, Any], ...]] = {}
        self._troubles: dict[tuple[str, int | None], _Trouble] = {}
        self._least, self._least_at = -1, now
        self.ended: dict[str, CollectiveLine] = {}
        self.lost: set[str] = set()

    def hear(self, node: str, line: CollectiveLine, now: float) -> None:
        """A line of a node's agent. Raises ValueError for one that our agent does not say."""
        ranks = set(self._ranks[node])
        if line.phase not in STAGES or any(rank not in ranks or entry.stage not in STAGES for rank, entry in line.ranks.items()):
            raise ValueError("ranks or stages that do not exist")
        self._heard[node] = now
        self._phases[node] = line.phase
        for rank, entry in line.ranks.items():
            if self._stages.get(rank) == IMPORTING != entry.stage:
                self._imported = now
            self._stages[rank] = entry.stage
            self._results[rank] = entry.results or ()
            if entry.error:
                self._note(node, rank, entry.error.splitlines()[-1] if entry.error.count("\n") > 3 else entry.error, now)
        if line.ended is not None:
            self.ended[node] = line
            if not all(self._stages.get(rank) == DONE for rank in ranks) and not any(entry.error for entry in line.ranks.values()):
                self._note(node, None, last_words(line), now)

    def lose(self, node: str, why: str, now: float) -> None:
        """A node's agent cannot be heard any more."""
        self.lost.add(node)
        self._note(node, None, why, now)

    def is_silent(self, node: str, now: float) -> bool:
        """True for a node that should speak every second and has not for long."""
        return node not in self.ended and node not in self.lost and now - self._heard[node] > SILENT_S

    def states(self, now: float) -> tuple[RankState, ...]:
        """All ranks, rising."""
        return tuple(
            RankState(rank, node, self.stage(node, rank), is_silent=node in self.lost or self.is_silent(node, now))
            for rank, node in sorted((rank, node) for node, ranks in self._ranks.items() for rank in ranks)
        )

    def stage(self, node: str, rank: int) -> str:
        """What a rank is doing; before it says something itself, what its torchrun is doing."""
        return self._stages.get(rank, self._phases[node])

    def results(self, rank: int) -> tuple[dict[str, Any], ...]:
        """What a rank has written down of its sizes, as it is."""
        return self._results.get(rank, ())

    def outcome(self, now: float) -> CollectiveOutcome | None:
        """How the test ended, None while it goes on."""
        states = self.states(now)
        if all(state.stage == DONE for state in states):
            return CollectiveOutcome("done")
        silent = tuple(state for state in states if state.is_silent and state.node not in self.lost)
        if silent:
            return CollectiveOutcome("stuck", f"nothing was heard from {silent[0].node} for {SILENT_S:.0f} s", missing=silent)
        troubles = sorted(self._troubles.values(), key=lambda trouble: trouble.at)
        if troubles:
            own = [trouble for trouble in troubles if not trouble.is_echo]
            if own and now - troubles[0].at >= _SETTLE_S:
                lost_ranks = tuple(state for state in states if state.node == own[0].node) if own[0].node in self.lost else ()
                return CollectiveOutcome("failed", own[0].text, own[0].node, missing=lost_ranks)
            if now - troubles[0].at >= _ECHO_S:
                return CollectiveOutcome("failed", f"{troubles[0].text} (on {troubles[0].node})", missing=_behind(states))
        is_importing = any(stage == IMPORTING for stage in self._stages.values())
        if now >= (self._started + IMPORT_LIMIT_S if is_importing else max(self._started, self._imported) + LIMIT_S):
            behind = _behind(states)
            places = ", ".join(f"rank {state.rank} ({state.node}) at: {state.stage}" for state in behind or states)
            return CollectiveOutcome("stuck", f"it stopped making progress after {now - self._started:.0f} s: {places}", missing=behind)
        return None

    def progress(self, now: float) -> str:
        """One line for the person: what the slowest are doing."""
        states = [state for state in self.states(now) if state.stage != DONE]
        if not states:
            return "collective test: all ranks are done"
        least = min(STAGES.index(state.stage) for state in states)
        slowest = [state for state in states if STAGES.index(state.stage) == least]
        if least != self._least:
            self._least, self._least_at = least, now
        is_quick = now - self._least_at < _NAMED_AFTER_S  # a rank that is a moment later than the others gets no line
        where = (
            ""
            if is_quick or len(slowest) == sum(map(len, self._ranks.values()))
            else f" on {', '.join(dict.fromkeys(state.node for state in slowest))}"
        )
        late = STAGES[least] == IMPORTING and now - self._started > LIMIT_S / 2
        more = f" (slow: waiting up to {IMPORT_LIMIT_S:.0f} s)" if late else ""
        return f"collective test: {STAGES[least]}{where}{more}"

    def _note(self, node: str, rank: int | None, text: str, now: float) -> None:
        self._troubles.setdefault((node, rank), _Trouble(now, node, text, is_echo=bool(_ECHO.search(text)) and node not in self.lost))


def _behind(states: tuple[RankState, ...]) -> tuple[RankState, ...]:
    """The ranks that are behind the others; none when all are at the same stage."""
    places = [STAGES.index(state.stage) for state in states]
    if min(places) == max(places):
        return ()
    return tuple(state for state, place in zip(states, places, strict=True) if place == min(places))


def last_words(line: CollectiveLine) -> str:
    """Why torchrun ended on a node, from what it and its ranks have printed."""
    assert line.ended is not None
    for text in reversed(line.ended.log):
        signal = re.search(r"Signal \d+ \((\w+)\) received by PID \d+", text)
        if signal:
            fatal = next((entry for entry in line.ended.errors if entry.startswith("Fatal Python error")), None)
            return f"a rank was ended by {signal.group(1)}{f' ({fatal})' if fatal else ''}"
    words = [
        text.strip() for text in (*line.ended.log, *line.ended.errors) if re.match(r"\s*\w*(?:Error|Exception)\b|.*No module named", text)
    ]
    words = words or [text.strip() for text in (*line.ended.log, *line.ended.errors) if text.strip()]
    return words[-1][:500] if words else f"torchrun ended with exit code {line.ended.returncode} and printed nothing"
