"""Who may start a run on this node: one command or supervisor at a time, and nobody whose run was stopped meanwhile.

`<workdir>/claims/`: RUN.json, the claim on a run; RUN.stopped, since when it is stopped by hand; .started, the newest launch.
A claim lasts until its start, its release, a stop by hand (which needs no room on the disk), or `LIFE_S` where somebody else wants it.
Ages are counted by this machine's own clock that runs through sleep: those of controllers need not agree with it, or with each other.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.system import boot_clock, processes
from homelab.shared.protocol import files, layout, lock
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.message import Done
from homelab.shared.protocol.owner_messages import Claimed, Holder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from homelab.shared.protocol.files import JsonObject
    from homelab.shared.protocol.request import RunRequest
    from homelab.shared.protocol.run_requests import ClaimRequest, ReleaseRequest, StartRequest, StopRequest, UndoRequest

LIFE_S = 300.0  # a claim that takes longer stays, unless another command wants it: then the start is refused, and nothing is stopped
LOCK_S = 8.0  # the holder of the lock writes some small files; a controller waits 20 s for an answer
_KEPT_S = 24 * 3600.0


class RefusedError(Refusal):
    """`kind`: "taken" (by another command), "stopped" (by hand), "superseded" (a newer attempt runs elsewhere) or "frozen" (its lock is kept)."""

    def __init__(self, kind: str, message: str, hint: str, where: str = "") -> None:
        super().__init__(message, where=where, hint=hint, kind=kind)


def claim(request: ClaimRequest) -> Claimed:
    """Take the run for `token`: the newest attempt known here, or who has it. Idempotent. Raises RefusedError, OSError."""
    run, token, age_s = request.run, request.token, request.age_s
    with locked(request.workdir) as folder:
        _sweep(folder)
        _refuse_stopped(folder, run, age_s)
        _refuse_superseded(request)
        if request.alone:
            if os.path.exists(os.path.join(paths.run_dir(request.workdir, run), "run.json")):
                raise RefusedError("taken", f"a run called {run} is on this node already", see(run) + "; or launch once more")
            started = files.read_object(os.path.join(folder, ".started")) or {}
            if started.get("run") != run and boot_clock.passed_s(started) <= age_s:
                return Claimed(holder=_shown(started, started.get("run"), is_started=True))
        for other, other_claim in of_workdir(request.workdir).items():
            is_wanted = other == run or request.alone
            if is_wanted and other_claim.get("token") not in (token, request.instead) and boot_clock.passed_s(other_claim) < LIFE_S:
                return Claimed(holder=_shown(other_claim, other))
        kept = {"token": token, "by": request.by, "doing": request.doing, "process": request.process}
        files.write_json(_file(folder, run), dict(kept, run=run, alone=request.alone, **boot_clock.now()))
    return Claimed(holder=None, newest=_newest(request))


def release(request: ReleaseRequest | UndoRequest) -> Done:
    """Give up the claim of `token`; every other claim stays."""
    with locked(request.workdir) as folder:
        _give_up(folder, request)
    return Done()


def _give_up(folder: str, request: ReleaseRequest | UndoRequest) -> None:
    if (files.read_object(_file(folder, request.run)) or {}).get("token") == request.token:
        _remove(_file(folder, request.run))


@contextlib.contextmanager
def starting(request: StartRequest) -> Iterator[None]:
    """Around the start of a run: with its claim, which is used up then. Raises RefusedError before anything is done without.

    Nobody stops or claims meanwhile. A start without a token (of an older controller) needs that nobody else has the run.
    """
    run, token = request.run, request.token
    with locked(request.workdir) as folder:
        current = files.read_object(_file(folder, run)) or {}
        if token is None and current and boot_clock.passed_s(current) < LIFE_S:
            raise _taken(run, current)
        if token is not None and current.get("token") != token:
            if current:
                raise _taken(run, current)
            _refuse_stopped(folder, run, LIFE_S)
            raise RefusedError("taken", f"another controller has started {run} meanwhile, or the claim on it is gone", see(run))
        if current.get("alone"):
            _refuse_overtaken(request, boot_clock.passed_s(current))
        yield
        if current.get("alone"):
            with contextlib.suppress(OSError):
                files.write_json(os.path.join(folder, ".started"), dict(current, **boot_clock.now()))
        _remove(_file(folder, run))


def refuse_undone(request: StartRequest) -> None:
    """At the end of `starting`. Raises RefusedError where the claim was taken away by an undo or a stop that did not get the lock."""
    if request.token is not None and (files.read_object(_file(_folder(request.workdir), request.run)) or {}).get("token") != request.token:
        raise RefusedError("stopped", f"the start of {request.run} was undone or stopped meanwhile", goes_on(request.run))


@contextlib.contextmanager
def stopping(request: StopRequest) -> Iterator[None]:
    """The context of a stop. `by_hand`: the holder of the run's claim may not start it any more. With a token it is a recovery's own stop.

    Raises RefusedError when another holder has claimed the run, or when the run has gone on after the attempt `after`.
    """
    run, token = request.run, request.token
    if token is None and not request.by_hand:
        _refuse_superseded(request)
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(locked(request.workdir))
        except RefusedError:  # a start that has the lock, and is frozen, looks for its claim once more
            with contextlib.suppress(OSError):
                if request.by_hand:
                    _remove(_file(_folder(request.workdir), run))
            raise
        except OSError:  # a disk that is full, or cannot be written: nothing can be claimed or started there either
            folder = None
        if folder and request.by_hand:
            _remove(_file(folder, run))
            with contextlib.suppress(OSError):
                files.write_json(_mark(folder, run), dict(boot_clock.now(), attempt=_newest(request)))
        if folder and token is not None:
            current = files.read_object(_file(folder, run)) or {}
            if current and current.get("token") != token and boot_clock.passed_s(current) < LIFE_S:
                raise _taken(run, current)
            _refuse_superseded(request)
        stack.close()  # the stop finds what runs now; a later start must take this lock first
        yield


def undo(request: UndoRequest) -> bool:
    """What the claim of `token` has begun: True where it has started the newest attempt (that is to be stopped then). The claim is gone after it."""
    with contextlib.suppress(OSError):
        try:
            release(request)
        except RefusedError:  # nobody else can claim the run meanwhile, and a start that keeps the lock looks for its claim once more
            _give_up(_folder(request.workdir), request)
    folder = paths.run_dir(request.workdir, request.run)
    newest = paths.newest_attempt(folder)
    nodes = os.path.join(paths.attempt_dir(folder, newest), "nodes")
    names = os.listdir(nodes) if os.path.isdir(nodes) else []
    starts = [files.read_object(os.path.join(nodes, name, "start.json")) or {} for name in names]
    return any(start.get("token") == request.token for start in starts)


def holder(workdir: str, run: str) -> Holder | None:
    """Who has claimed the run now; None for nobody."""
    current = files.read_object(_file(_folder(workdir), run)) or {}
    return _shown(current, run) if current and boot_clock.passed_s(current) < LIFE_S else None


def stopped_attempt(workdir: str, run: str) -> int | None:
    """The newest attempt at the last stop by hand; None where there was none, or where that is not known any more."""
    attempt = (files.read_object(_mark(_folder(workdir), run)) or {}).get("attempt")
    return attempt if isinstance(attempt, int) and attempt >= 0 else None


def was_stopped(request: RunRequest, since_s: float) -> bool:
    """Whether the run was stopped by hand after `since_s` (of `boot_clock.clock_s`): why a start has failed in which it came."""
    folder = _folder(request.workdir)
    try:
        with contextlib.suppress(RefusedError), locked(request.workdir):
            pass  # a process that was writing the mark has finished; a frozen process is not waited for: a mark that is there counts
        return boot_clock.passed_s(files.read_object(_mark(folder, request.run)) or {}) < boot_clock.clock_s() - since_s
    except OSError:
        return False


@contextlib.contextmanager
def locked(workdir: str) -> Iterator[str]:
    """The folder of claims, locked. The kernel releases the lock when its holder ends; a frozen holder keeps it.

    Raises OSError, and RefusedError with the holder's name after `LOCK_S` seconds.
    """
    folder = _folder(workdir)
    os.makedirs(folder, exist_ok=True)
    place = os.path.join(folder, ".lock")
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not lock.taken(descriptor, LOCK_S):
            raise _frozen(descriptor, place)
        yield folder
    finally:
        os.close(descriptor)


def _folder(workdir: str) -> str:
    return os.path.join(paths.expand(workdir), "claims")


def _frozen(descriptor: int, place: str) -> RefusedError:
    pid = lock.holder(descriptor)
    if pid is None:
        message = f"a process has held the lock of the claims for {LOCK_S:.0f} s"
        return RefusedError("frozen", message, f"on the node, to see the process: fuser -v {shlex.quote(place)}; then end it", place)
    manner = "is frozen (stopped by a signal or a debugger) and holds" if processes.state(pid) in ("T", "t") else "has held"
    message = f"process {pid} {manner} the lock of the claims for more than {LOCK_S:.0f} s: {processes.command_line(pid)[:200] or '?'}"
    hint = f"on the node: kill -CONT {pid} lets it continue, kill -KILL {pid} ends it; then run the command again"
    return RefusedError("frozen", message, hint, place)


def _refuse_stopped(folder: str, run: str, age_s: float) -> None:
    stopped_s = boot_clock.passed_s(files.read_object(_mark(folder, run)) or {})
    if stopped_s < age_s:
        raise RefusedError("stopped", f"{run} was stopped by hand {stopped_s:.0f} s ago, during this command", goes_on(run))


def _refuse_overtaken(request: StartRequest, age_s: float) -> None:
    """A launch that shipped for longer than its claim counts may have been overtaken by another, which has found the cards free."""
    started = files.read_object(os.path.join(_folder(request.workdir), ".started")) or {}
    launches = {str(started.get("run")): started} if boot_clock.passed_s(started) < age_s else {}
    launches.update(
        (name, its)
        for name, its in of_workdir(request.workdir).items()
        if its.get("alone") and boot_clock.passed_s(its) < min(age_s, LIFE_S)
    )
    for other in sorted(set(launches) - {request.run}):
        raise RefusedError("taken", f"another launch has taken this node meanwhile: {other}, by {launches[other].get('by')}", see(other))


def _refuse_superseded(request: ClaimRequest | StopRequest) -> None:
    after, newest = request.after, _newest(request)
    if after is not None and newest > after:
        message = f"{request.run} was continued elsewhere: this node knows attempt {newest} of it"
        raise RefusedError("superseded", message, see(request.run))


def _newest(request: RunRequest) -> int:
    """The newest attempt that this node knows."""
    return paths.newest_attempt(paths.run_dir(request.workdir, request.run))


def _taken(run: str, current: JsonObject) -> RefusedError:
    holder = _shown(current, run)
    return RefusedError("taken", f"{run} is being {holder.doing} by {holder.by}", see(run))


def goes_on(run: str) -> str:
    """The command that continues a stopped run."""
    return f"it stays stopped; to continue it: homelab recover {run}"


def see(run: str) -> str:
    """The commands for a run that another command has claimed."""
    return f"homelab status {run}; if that command is gone: homelab stop {run}, then run this command again"


def _shown(current: JsonObject, run: Any, is_started: bool = False) -> Holder:
    """The holder as a controller reads it: complete, even where the file is not."""
    age_s = boot_clock.passed_s(current)
    token, by, doing = (current[key] if isinstance(current.get(key), str) else "" for key in ("token", "by", "doing"))
    process = current.get("process")
    process = process if isinstance(process, dict) else {}
    return Holder(run=str(run), token=token, by=by, doing=doing, age_s=min(age_s, LIFE_S), process=process, is_started=is_started)


def of_workdir(workdir: str) -> dict[str, JsonObject]:
    """{run: its claim} of all that are whole, old ones too."""
    claims, folder = {}, _folder(workdir)
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        content = files.read_object(os.path.join(folder, name)) if name.endswith(".json") else None
        if content is not None and content.get("run") == name[:-5]:
            claims[name[:-5]] = content
    return claims


def _file(folder: str, run: str) -> str:
    return os.path.join(folder, layout.checked(run) + ".json")


def _mark(folder: str, run: str) -> str:
    return os.path.join(folder, layout.checked(run) + ".stopped")


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _sweep(folder: str) -> None:
    """Remove records of claims and stops that are too old to matter."""
    for name in os.listdir(folder):
        entry = files.read_object(os.path.join(folder, name)) if name != ".lock" else None
        if entry is not None and boot_clock.passed_s(entry) > _KEPT_S:
            _remove(os.path.join(folder, name))
