"""Who may start a run on this node: one command or supervisor at a time, and nobody whose run was stopped meanwhile.

`<workdir>/claims/`: RUN.json, the claim on a run; RUN.stopped, since when it is stopped by hand; .started, the newest launch.
A claim lasts until its start, its release, a stop by hand (which needs no room on the disk), or `LIFE_S` where somebody else wants it.
Ages are counted by this machine's own clock that runs through sleep: those of controllers need not agree with it, or with each other.
"""

import contextlib
import fcntl
import os
import time

from homelab.node import files, paths, processes

LIFE_S = 300.0  # who ships for longer keeps it, unless somebody else wants it: then the start is refused, and nothing is stopped
LOCK_S = 8.0  # whoever has the lock writes some small files; a controller waits 20 s for an answer
_KEPT_S = 24 * 3600.0


class RefusedError(ValueError):
    """`kind` is "taken" (by somebody else), "stopped" (by hand), "superseded" (the run has gone on elsewhere) or "frozen" (a process keeps
    the lock); `where`, beside the node, and `hint` mends it."""

    def __init__(self, kind, message, hint, where=None):
        super().__init__(message)
        self.kind, self.hint, self.where = kind, hint, where


def claim(request):
    """Take the run for `token`: {"holder": null, "newest": newest attempt known here}, or {"holder": who has it}. Idempotent.

    `request`: run, token, by, doing, process (`homelab.runs.owner`), age_s (since the claimer began: a stop by hand that is younger
    ends what it is about), after (newest attempt it knows, null where it is to find out), alone (a launch: no other run may be
    starting here, or have started since), instead (token of a claim whose owner is dead). Raises RefusedError, OSError.
    """
    run, token, age_s = paths.checked(request["run"]), str(request["token"]), float(request["age_s"])
    with locked(request["workdir"]) as folder:
        _sweep(folder)
        _refuse_stopped(folder, run, age_s)
        _refuse_superseded(request)
        if request.get("alone"):
            _refuse_known(request["workdir"], run)
            started = files.read_object(os.path.join(folder, ".started")) or {}
            if started.get("run") != run and _age_s(started) <= age_s:
                return {"holder": _shown(started, started.get("run"), is_started=True)}
        for other, held in _claims(folder).items():
            is_wanted = other == run or request.get("alone")
            if is_wanted and held.get("token") not in (token, request.get("instead")) and _age_s(held) < LIFE_S:
                return {"holder": _shown(held, other)}
        kept = {key: request.get(key) for key in ("token", "by", "doing", "process")}
        files.write_json(_file(folder, run), dict(kept, run=run, alone=bool(request.get("alone")), **_now()))
    return {"holder": None, "newest": (paths.attempts(paths.run_dir(request["workdir"], run)) or [0])[-1]}


def release(request):
    """Give up the claim of `token`; that of anybody else stays."""
    with locked(request["workdir"]) as folder:
        is_ours = _token(folder, request["run"]) == request["token"]
        if is_ours:
            _remove(_file(folder, request["run"]))
    return {"released": is_ours}


@contextlib.contextmanager
def starting(request):
    """Around the start of a run: with its claim, which is used up then. Raises RefusedError before anything is done without.

    Nobody stops or claims meanwhile. A start without a token (of an older controller) needs that nobody else has the run.
    """
    run, token = paths.checked(request["run"]), request.get("token")
    with locked(request["workdir"]) as folder:
        held = files.read_object(_file(folder, run)) or {}
        if token is None and held and _age_s(held) < LIFE_S:
            raise _taken(run, held)
        if token is not None and held.get("token") != token:
            if held:
                raise _taken(run, held)
            _refuse_stopped(folder, run, LIFE_S)
            raise RefusedError("taken", "somebody else has started %s meanwhile, or the claim on it is gone" % run, see(run))
        yield
        if held.get("alone"):
            with contextlib.suppress(OSError):
                files.write_json(os.path.join(folder, ".started"), dict(held, **_now()))
        _remove(_file(folder, run))


@contextlib.contextmanager
def stopping(request):
    """Around a stop. `by_hand`: whoever has claimed the run may not start it any more. With a token, a recovery's own stop of what is left:
    raises RefusedError where somebody else has the run, or it has gone on after the attempt `after`.
    """
    run, token = paths.checked(request["run"]), request.get("token")
    if token is None and not request.get("by_hand"):
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(locked(request["workdir"]))
        except OSError:  # a disk that is full, or cannot be written: nothing can be claimed or started there either
            folder = None
        if folder and request.get("by_hand"):
            _remove(_file(folder, run))
            with contextlib.suppress(OSError):
                files.write_json(_mark(folder, run), _now())
        if folder and token is not None:
            held = files.read_object(_file(folder, run)) or {}
            if held and held.get("token") != token and _age_s(held) < LIFE_S:
                raise _taken(run, held)
            _refuse_superseded(request)
        stack.close()  # what runs now is found; what starts later has to come by here first
        yield


def undo(request):
    """What the claim of `token` has begun: True where it has started the newest attempt (that is to be stopped then). The claim is gone after it."""
    run = paths.checked(request["run"])
    with contextlib.suppress(OSError, RefusedError):
        release(request)
    folder = paths.run_dir(request["workdir"], run)
    newest = (paths.attempts(folder) or [0])[-1]
    nodes = os.path.join(paths.attempt_dir(folder, newest), "nodes")
    names = os.listdir(nodes) if os.path.isdir(nodes) else []
    starts = [files.read_object(os.path.join(nodes, name, "start.json")) or {} for name in names]
    return any(start.get("token") == request["token"] for start in starts)


def was_stopped(request, since_s):
    """Whether the run was stopped by hand after `since_s` (of `clock_s`): why a start has failed in which it came."""
    folder = _folder(request["workdir"])
    try:
        with contextlib.suppress(RefusedError), locked(request["workdir"]):
            pass  # whoever is writing the mark has written it; a frozen one is not waited for: a mark that is there counts
        return _age_s(files.read_object(_mark(folder, request["run"])) or {}) < clock_s() - since_s
    except OSError:
        return False


@contextlib.contextmanager
def locked(workdir):
    """The folder of claims, with nobody else in it. The kernel lets go of the lock with its holder; one that is frozen keeps it.

    Raises OSError, and RefusedError that names the holder after `LOCK_S`.
    """
    folder = _folder(workdir)
    os.makedirs(folder, exist_ok=True)
    place = os.path.join(folder, ".lock")
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait(descriptor, place)
        with contextlib.suppress(OSError):  # a full disk; then nobody knows who keeps it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        yield folder
    finally:
        os.close(descriptor)


def _folder(workdir):
    return os.path.join(paths.expand(workdir), "claims")


def _wait(descriptor, place):
    """flock(2) with a limit: it has none of its own."""
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise _frozen(descriptor, place) from None
        time.sleep(0.02)


def _frozen(descriptor, place):
    said = os.pread(descriptor, 32, 0).strip()
    if not said.isdigit():
        return RefusedError("frozen", "a process has kept the lock of the claims for %.0f s" % LOCK_S, "on the node, who it is: fuser -v %s; then end it" % place, place)
    pid = int(said)
    how = "is frozen (stopped by a signal or a debugger) and keeps" if processes.state(pid) in ("T", "t") else "has kept"
    message = "process %d %s the lock of the claims for more than %.0f s: %s" % (pid, how, LOCK_S, processes.command_line(pid)[:200] or "?")
    hint = "on the node: kill -CONT %d lets it go on, kill -KILL %d ends it; then the same once more" % (pid, pid)
    return RefusedError("frozen", message, hint, place)


def boot_id():
    """Changes with every boot: a pid from before a power cut means nothing."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _now():
    return {"at_s": clock_s(), "boot_id": boot_id()}


def clock_s():
    """Seconds of this machine's clock that runs through sleep."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _age_s(entry):
    """Seconds since it was written; endless for one of another boot, or that is not whole."""
    at_s = entry.get("at_s")
    if not isinstance(at_s, (int, float)) or entry.get("boot_id") != boot_id():
        return float("inf")
    return max(0.0, clock_s() - at_s)


def _refuse_stopped(folder, run, age_s):
    stopped_s = _age_s(files.read_object(_mark(folder, run)) or {})
    if stopped_s < age_s:
        raise RefusedError("stopped", "%s was stopped by hand %.0f s ago, while this was under way" % (run, stopped_s), goes_on(run))


def _refuse_superseded(request):
    after = request.get("after")
    newest = (paths.attempts(paths.run_dir(request["workdir"], request["run"])) or [0])[-1]
    if after is not None and newest > int(after):
        raise RefusedError("superseded", "%s has gone on elsewhere: this node knows attempt %d of it" % (request["run"], newest), see(request["run"]))


def _refuse_known(workdir, run):
    """A launch makes a run that nobody has yet."""
    if os.path.exists(os.path.join(paths.run_dir(workdir, run), "run.json")):
        raise RefusedError("taken", "a run called %s is on this node already" % run, see(run) + "; or launch once more")


def _taken(run, held):
    shown = _shown(held, run)
    return RefusedError("taken", "%s is being %s by %s" % (run, shown["doing"], shown["by"]), see(run))


def goes_on(run):
    """What mends that it was stopped."""
    return "it stays stopped; to go on with it: homelab recover %s" % run


def see(run):
    """What to do where somebody else has it."""
    return "homelab status %s; where the command that does it is gone: homelab stop %s, then once more" % (run, run)


def _shown(held, run, is_started=False):
    """What a controller is told of the holder: whole, whatever the file says."""
    age_s = _age_s(held)
    found = {key: held[key] if isinstance(held.get(key), str) else "" for key in ("token", "by", "doing")}
    process = held.get("process") if isinstance(held.get("process"), dict) else {}
    return dict(found, run=str(run), age_s=age_s if age_s < LIFE_S else LIFE_S, process=process, is_started=is_started)


def _claims(folder):
    """{run: its claim} of all that are whole."""
    found = {}
    for name in os.listdir(folder):
        held = files.read_object(os.path.join(folder, name)) if name.endswith(".json") else None
        if held is not None and held.get("run") == name[:-5]:
            found[name[:-5]] = held
    return found


def _token(folder, run):
    return (files.read_object(_file(folder, run)) or {}).get("token")


def _file(folder, run):
    return os.path.join(folder, paths.checked(run) + ".json")


def _mark(folder, run):
    return os.path.join(folder, paths.checked(run) + ".stopped")


def _remove(path):
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _sweep(folder):
    """What is over for long."""
    for name in os.listdir(folder):
        entry = files.read_object(os.path.join(folder, name)) if name != ".lock" else None
        if entry is not None and _age_s(entry) > _KEPT_S:
            _remove(os.path.join(folder, name))
