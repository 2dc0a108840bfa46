"""The folder of the queue: one file for each job, in the folder of its state. Every change is one rename, so a crash leaves each job in one place.

waiting/0003.json     a job (`queued_job`); running/, done/ and failed/ are the same, and removed/ has what a person took out
order.json            the numbers of the jobs that wait, in their order; new ones come last
told.json             the numbers of the jobs of whose end the owner was told
pause.json            whether the queue is paused, and since when
edit.lock             held while a job is changed, for an instant; runner.lock as long as a runner works
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from homelab.controller.base.errors import HomelabError, InputError, did_you_mean
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.features.queue.queued_job import STATES, QueuedJob, State
from homelab.controller.features.queue.turns import Listing
from homelab.controller.run import kept_lock, store
from homelab.shared.protocol import files, lock

NAME = "queue"
EDIT_S = 10.0  # a change writes one small file, also on a disk that is slow
_REMOVED: Literal["removed"] = "removed"


@dataclass(frozen=True)
class QueueFolder:
    """Of the runs in `runs_dir`, beside which it lies.

    `kept` hears of a change that cannot be made because another process keeps the queue locked, and the change is waited for: a runner must not
    end in the night because a person has stopped a command by Ctrl-Z. Without it, the error is raised after `EDIT_S`.
    """

    runs_dir: Path
    kept: Say | None = None

    @property
    def root(self) -> Path:
        """The folder itself."""
        return self.runs_dir / NAME

    def listing(self) -> Listing:
        """All jobs now. Nothing is made where there is no queue yet."""
        if not self.root.is_dir():
            return Listing()
        with self._edited():
            return self._listing()

    def _listing(self) -> Listing:
        found: dict[State, list[QueuedJob]] = {state: [] for state in STATES}
        damaged = []
        for state in STATES:
            for file in sorted((self.root / state).glob("*.json")):
                try:
                    found[state].append(QueuedJob.model_validate(store.read_object(file)))
                except ValidationError:
                    damaged.append(str(file))
        order = {number: place for place, number in enumerate(self._order())}
        waiting = sorted(found["waiting"], key=lambda job: (order.get(job.number, len(order)), job.number))
        pause = store.read_object(self.root / "pause.json")
        since, is_paused = pause.get("since"), pause.get("is_paused") is True
        resumed_at = float(since) if not is_paused and isinstance(since, int | float) else 0.0
        return Listing(
            tuple(waiting), tuple(found["running"]), tuple(found["done"]), tuple(found["failed"]), is_paused, resumed_at, tuple(damaged)
        )

    def _order(self) -> list[int]:
        numbers = store.read_json(self.root / "order.json")
        return [number for number in numbers if isinstance(number, int)] if isinstance(numbers, list) else []

    def add(self, make: Callable[[int], Sequence[QueuedJob]]) -> tuple[QueuedJob, ...]:
        """Put jobs behind all others; `make` is told the first free number. A number is never used twice, also if its job was removed."""
        with self._edited():
            used = [
                int(file.stem) for folder in (*STATES, _REMOVED) for file in (self.root / folder).glob("*.json") if file.stem.isdecimal()
            ]
            jobs = tuple(make(max(used, default=0) + 1))
            try:
                for job in jobs:
                    self._write("waiting", job)
            except OSError:  # all or none: whoever frees the disk adds them again
                for job in jobs:
                    self._file("waiting", job.number).unlink(missing_ok=True)
                raise
            return jobs

    def write(self, folder: State, job: QueuedJob) -> QueuedJob:
        """New content of a job that lies in this folder. One that was taken away meanwhile stays away."""
        with self._edited():
            if self._file(folder, job.number).is_file():
                self._write(folder, job)
        return job

    def shift(self, number: int, source: State, target: State) -> bool:
        """Put a job into another folder, with the content it has; False if it is not there any more."""
        with self._edited():
            return self._shift(number, source, target)

    def move(self, number: int, place: int) -> None:
        """Give a job that waits this place, from 1 on. Raises InputError."""
        self._refuse_none(number)
        with self._edited():
            listing = self._listing()
            job = self._existing(listing, number)
            if job not in listing.waiting:
                raise InputError(
                    f"job {number} does not wait any more", where=f"job {number}, {Path(job.recipe).name}", hint=Hint("{} shows what waits", homelab("queue"))
                )  # fmt: skip
            others = [other.number for other in listing.waiting if other.number != number]
            if not 1 <= place <= len(others) + 1:
                raise InputError(
                    f"there is no place {place}", where=f"{len(others) + 1} jobs wait", hint=Hint("the first place is {}", homelab(f"queue move {number} 1"))
                )  # fmt: skip
            self._put("order.json", [*others[: place - 1], number, *others[place - 1 :]])

    def remove(self, numbers: Sequence[int]) -> list[QueuedJob]:
        """Take jobs out: all of them, or none. Raises InputError for one that trains."""
        self._refuse_none(numbers[0])
        with self._edited():
            listing = self._listing()
            jobs = [self._existing(listing, number) for number in dict.fromkeys(numbers)]
            for job in jobs:
                if job in listing.running:
                    raise InputError(
                        f"job {job.number} trains" if job.run else f"job {job.number} is being started", where=f"job {job.number}, {Path(job.recipe).name}",
                        hint=Hint("stop it: {}, then the same command again", homelab("stop", job.run)) if job.run else "type the same command in a minute",
                    )  # fmt: skip
            for job in jobs:
                folder: State = "waiting" if job in listing.waiting else "done" if job in listing.done else "failed"
                self._shift(job.number, folder, _REMOVED)
            return jobs

    def pause(self, now: float, *, is_paused: bool) -> None:
        """Start nothing more, or go on; a person who lets it go on has looked at nodes that failed."""
        with self._edited():
            self._put("pause.json", {"is_paused": is_paused, "since": now})

    def untold(self) -> tuple[int, ...]:
        """The numbers of the jobs that are over, and of which the owner was not told yet. What was over before the first runner is known."""
        listing, file = self.listing(), self.root / "told.json"
        over = sorted(listing.over)
        told = store.read_json(file) if file.is_file() else None
        if not isinstance(told, list):  # the first runner, or a file that somebody has damaged
            self.told(told := over)
        return tuple(number for number in over if number not in told)

    def told(self, numbers: Sequence[int]) -> None:
        """The owner knows of the end of these jobs."""
        with store.disk_errors_as_hints(self.root / "told.json"):
            self._put("told.json", list(numbers))

    @contextmanager
    def runner(self) -> Iterator[None]:
        """Be the one runner inside the block. Raises HomelabError if another process is."""
        with store.disk_errors_as_hints(self.root / "runner.lock"):
            self._make()
            descriptor = _opened(self.root / "runner.lock")
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                by = files.text(self.root / "runner.lock")
                raise HomelabError(
                    "another homelab queue run is at work here", where=f"{self.root}, process {by or 'unknown'}",
                    hint=Hint("nothing is needed; what it does: {}", homelab("queue")),
                ) from None  # fmt: skip
            with store.best_effort_write(self.root / "runner.lock"):  # its content is for people
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def has_runner(self) -> bool:
        """Whether a runner works on this queue."""
        return lock.is_held(self.root / "runner.lock")

    @contextmanager
    def _edited(self) -> Iterator[None]:
        """Nobody else changes a job inside the block. Raises HomelabError where another process stays in it."""
        file = self.root / "edit.lock"
        with store.disk_errors_as_hints(file):
            self._make()
            descriptor = _opened(file)
            try:
                while not lock.taken(descriptor, EDIT_S):
                    error = kept_lock.error("the queue", file, descriptor, EDIT_S)
                    if self.kept is None:
                        raise error
                    self.kept(f"{error.message}; {error.hint}")
                yield
            finally:
                os.close(descriptor)

    def _make(self) -> None:
        if (self.root / _REMOVED).is_dir():  # the last of them
            return
        for folder in (*STATES, _REMOVED):
            (self.root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        store.keep_private(self.root)

    def _refuse_none(self, number: int) -> None:
        """Raises InputError before anything is made, if there is no queue."""
        if not self.root.is_dir():
            self._existing(Listing(), number)

    def _existing(self, listing: Listing, number: int) -> QueuedJob:
        job = listing.with_number(number)
        if job is not None:
            return job
        numbers = [str(other.number) for other in listing.jobs]
        raise InputError(
            f"no job has number {number}.{did_you_mean(str(number), numbers)}",
            where=f"the queue has {', '.join(numbers)}" if numbers else "the queue is empty",
            hint=homelab("queue") if numbers else homelab("queue add RECIPE"),
        )

    def _file(self, folder: State | Literal["removed"], number: int) -> Path:
        return self.root / folder / f"{number:04d}.json"

    def _shift(self, number: int, source: State, target: State | Literal["removed"]) -> bool:
        try:
            os.rename(self._file(source, number), self._file(target, number))
        except FileNotFoundError:
            return False
        files.sync(self.root / target)
        files.sync(self.root / source)
        return True

    def _write(self, folder: State, job: QueuedJob) -> None:
        # Word for word: the recipe is trained as it is.
        files.write_json(self._file(folder, job.number), job.model_dump(mode="json"), 0o600)

    def _put(self, name: str, value: object) -> None:
        files.write_json(self.root / name, value, 0o600)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
