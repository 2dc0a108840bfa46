"""The queue as lines and as JSON. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rich.text import Text

from homelab.controller.base.hint import homelab
from homelab.controller.base.units import local_moment
from homelab.controller.dashboard.columns import Column, lay
from homelab.controller.dashboard.words import NOTHING
from homelab.controller.features.queue import turns
from homelab.controller.features.queue.queued_job import QueuedJob
from homelab.controller.features.queue.turns import Clock, Expected, Listing

_COLUMNS = (
    Column("job", "right"), Column("recipe"), Column("nodes", importance=2), Column("state"), Column("begins", importance=1), Column("ends"),
)  # fmt: skip
_MOST_NODES = 14


@dataclass(frozen=True)
class QueueList:
    """What `homelab queue` shows. `has_runner`: a runner works on it."""

    listing: Listing
    clock: Clock
    has_runner: bool

    @property
    def first_line(self) -> str:
        """The answer."""
        listing = self.listing
        counts = [(listing.running, "trains", "train"), (listing.waiting, "waits", "wait")]
        counts += [(listing.failed, "has failed", "have failed"), (listing.done, "is done", "are done")]
        parts = [f"{len(jobs)} {one if len(jobs) == 1 else many}" for jobs, one, many in counts if jobs]
        parts[:1] = [part.replace(" ", " job " if part.startswith("1 ") else " jobs ", 1) for part in parts[:1]]
        if not parts:
            return "The queue is empty."
        if not listing.waiting and not listing.running:
            return f"Nothing waits: {', '.join(parts)}."
        return f"{', '.join(parts)}{self._last()}.{self._stands()}"

    def _last(self) -> str:
        ends = [one.ends for one in self._expected.values()]
        known = [end for end in ends if end is not None]
        return f"; the last ends about {local_moment(max(known), self.clock.now)} if nothing fails" if len(known) == len(ends) else ""

    def _stands(self) -> str:
        if self.listing.is_paused:
            return " The queue is paused."
        return "" if self.has_runner else " No runner works, so nothing is started."

    @property
    def _expected(self) -> Mapping[int, Expected]:
        return turns.expected(self.listing, self.clock)

    def table(self, width: int) -> list[Text]:
        """A heading and a line for each job."""
        expected = self._expected
        return lay(_COLUMNS, [self._cells(job, expected.get(job.number)) for job in self.listing.jobs], width, indent=0)

    def _cells(self, job: QueuedJob, expected: Expected | None) -> list[Text]:
        begins, ends = (
            (expected.begins, expected.ends) if expected else (job.tries[0].began_at if job.tries else None, job.ended_at or None)
        )
        nodes = ",".join(job.nodes)
        shown = "all" if not nodes else nodes if len(nodes) <= _MOST_NODES else f"{len(job.nodes)} nodes"
        settings = " ".join(part.rpartition(".")[2] for part in job.settings.split())
        name = f"{_cut(PurePath(job.recipe).name, 22)}{f' {_cut(settings, 24)}' if settings else ''}"
        times = [NOTHING if moment is None else local_moment(moment, self.clock.now) for moment in (begins, ends)]
        state = self.state(job)
        style = {"running": "green", "failed": "red", "waiting": "yellow"}.get(state, "")
        return [Text(str(job.number)), Text(name), Text(shown), Text(_WORDS.get(state, state), style=style), *map(Text, times)]

    def state(self, job: QueuedJob) -> str:
        """As it lies in the queue: one that is being started is not waiting any more."""
        if job in self.listing.running:
            return "running" if job.state == "running" else "starting"
        return job.state

    def reasons(self) -> list[str]:
        """A sentence for each job that does not go its way: why it waits, why it failed."""
        said = []
        waits = turns.waits(self.listing, self.clock) if not self.listing.is_paused else {}
        for job in self.listing.jobs:
            because = waits.get(job.number) or (job.because if job.state in ("waiting", "failed") else "")
            if because:
                said.append(f"job {job.number} {'waits' if job.state == 'waiting' else 'failed'}: {because}")
        return [
            *said,
            *(
                f"{file} is damaged; move it away: mv {shlex.quote(str(file))} {shlex.quote(f'{file}.damaged')}"
                for file in self.listing.damaged
            ),
        ]

    def as_dict(self) -> dict[str, Any]:
        """The `--json` shape."""
        expected, waits = self._expected, turns.waits(self.listing, self.clock)
        jobs = []
        for job in self.listing.jobs:
            when = expected.get(job.number, Expected(job.tries[0].began_at if job.tries else None, job.ended_at or None))
            jobs.append({
                "number": job.number, "recipe": job.recipe, "settings": job.settings, "nodes": list(job.nodes), "state": self.state(job), "run": job.run or None,
                "after": job.after or None, "not_before": job.not_before or None, "stop_at": job.stop_at or None, "begins": when.begins, "ends": when.ends,
                "because": waits.get(job.number) or job.because,
            })  # fmt: skip
        return {"jobs": jobs, "paused": self.listing.is_paused, "runner": self.has_runner, "damaged": list(self.listing.damaged)}


_WORDS = {"running": "trains", "waiting": "waits", "starting": "starts"}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def ended(listing: Listing, numbers: Sequence[int]) -> str:
    """What became of these jobs, for the morning: "3 done, 2 failed: job 2 (law.toml), job 4 (big.toml)"."""
    done, failed = ([job for job in jobs if job.number in numbers] for jobs in (listing.done, listing.failed))
    names = ", ".join(f"job {job.number} ({PurePath(job.recipe).name}{f', {job.settings}' if job.settings else ''})" for job in failed)
    return f"{len(done)} done, {len(failed)} failed{f': {names}' if names else ''}"


def over(listing: Listing, clock: Clock, numbers: Sequence[int]) -> str:
    """The message at the end of a night: what became of these jobs, why those failed that did, and what still waits."""
    failed = [f"job {job.number} failed: {job.because}" for job in listing.failed if job.number in numbers]
    waits = [f"job {number} waits: {because}" for number, because in turns.waits(listing, clock).items()]
    return "\n".join([f"{ended(listing, numbers)}.", *failed, *waits, f"Next: {homelab('queue')}"])
