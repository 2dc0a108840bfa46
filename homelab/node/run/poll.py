"""What a node knows of a run right now: one JSON answer for the dashboard, `status`, `recover` and `--wait`."""

from __future__ import annotations

import collections
import glob
import itertools
import os
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import attempt_records, ownership, secret_files, supervisor_host
from homelab.node.system import boot_clock, processes, utilisation
from homelab.shared.protocol import files, layout, manifest, message
from homelab.shared.protocol.rank_messages import LogTail, RankReply
from homelab.shared.protocol.run_messages import Described, KnownRun, Reply, RunReply, Runs

if TYPE_CHECKING:
    from typing import BinaryIO

    from homelab.shared.protocol.files import JsonObject
    from homelab.shared.protocol.request import Request, RunRequest
    from homelab.shared.protocol.run_requests import PollRequest

MOST_METRICS = 20_000  # lines in one answer, about 8 MB
MOST_PLANS = 20  # in one answer, of about 5 KB a node: what attempts before have left, the checkpoints carry


def poll(request: PollRequest) -> Reply:
    """The poll reply."""
    run = request.run
    folder = paths.run_dir(request.workdir, run) if run else None
    return Reply(
        node=request.node,
        time=time.time(),
        hostname=os.uname().nodename,
        load=utilisation.read(),
        gpus=tuple(message.as_written(card) for card in utilisation.gpus()[1]),
        run=_run(folder, request) if folder and os.path.isdir(folder) else None,
        supervisor=supervisor_host.state(request.workdir, run) if run else None,
        owner=ownership.seen(request.workdir, run) if run else None,
    )


def runs(request: Request) -> Runs:
    """Every run this node has a folder of, newest first: name, attempt, recipe label, alive, exit, final."""
    root = os.path.join(paths.expand(request.workdir), "runs")
    alive = processes.of_runs(request.workdir, request.node)
    known_runs: list[KnownRun] = []
    # A folder that a person copied to "... (copy)" is not a run.
    for name in sorted(os.listdir(root) if os.path.isdir(root) else [], reverse=True):
        folder = os.path.join(root, name)
        described = files.read_object(os.path.join(folder, "run.json")) if layout.is_usable(name) else None
        if described is None:
            continue
        newest = paths.newest_attempt(folder)
        node_dir = paths.node_dir(folder, newest, paths.name_here(folder, newest, request.node)) if newest else None
        known_runs.append(
            KnownRun(
                name=name,
                created_at=described.get("created_at"),
                attempt=newest,
                alive=bool(alive.get(name)),
                exit=message.as_written(files.read_object(os.path.join(node_dir, "exit.json"))) if node_dir else None,
                final=os.path.exists(os.path.join(folder, "final", "README.md")),
                busy=ownership.busy(request.workdir, name),
            )
        )
    return Runs(runs=tuple(known_runs), secrets_removed=tuple(secret_files.remove_leftovers(request.workdir)))


def describe(request: RunRequest) -> Described:
    """run.json and the newest plans of a run, for a controller that did not launch it, or did not start them. Nulls when unknown."""
    folder = paths.run_dir(request.workdir, request.run)
    newest = sorted(itertools.islice(paths.attempts(folder), MOST_PLANS))
    plans = {number: files.read_object(os.path.join(paths.attempt_dir(folder, number), "plan.json")) for number in newest}
    return Described(run_json=files.read_object(os.path.join(folder, "run.json")), plans=plans)


def _run(folder: str, request: PollRequest) -> RunReply:
    attempt = request.attempt or paths.newest_attempt(folder)
    node = paths.name_here(folder, attempt, request.node)
    node_dir = paths.node_dir(folder, attempt, node)
    agent = attempt_records.agent(node_dir)
    pids = processes.of_run(os.path.basename(folder), request.workdir, node)
    agent_alive = agent is not None and agent["pid"] in pids
    of_node = [rank for rank in attempt_records.plan(folder, attempt)["ranks"] if rank["node"] == node]
    most = MOST_METRICS // max(1, len(of_node))
    ranks = {int(rank["rank"]): _rank(folder, attempt, node_dir, rank, request, most) for rank in of_node}
    return RunReply(
        name=os.path.basename(folder),
        as_node=node,
        attempt=attempt,
        agent_alive=agent_alive,
        processes=len(pids),
        torchrun_alive=agent is not None and agent["torchrun_pid"] in pids,
        exit=message.as_written(files.read_object(os.path.join(node_dir, "exit.json"))),
        started_at=agent["started_at"] if agent else None,
        rebooted=_rebooted(agent),
        stop_marked_at=_stop_marked_at(node_dir),
        ranks=ranks,
        more=any(len(rank.metrics) == most for rank in ranks.values()),
        torchrun_tail=tuple(files.tail(os.path.join(node_dir, "err.log"), request.torchrun_lines)),
        checkpoints=tuple(manifest.steps(folder)),
        final=os.path.exists(os.path.join(folder, "final", "README.md")),
        secrets_removed=bool(agent) and not agent_alive and bool(secret_files.remove_leftovers(request.workdir, request.run)),
    )


def _rebooted(agent: JsonObject | None) -> bool | None:
    """Whether this machine was started anew since the attempt was; None where that is not known."""
    then, now = (agent or {}).get("boot_id"), boot_clock.boot_id()
    return then != now if isinstance(then, str) and then and now else None


def _stop_marked_at(node_dir: str) -> float | None:
    """When homelab itself was about to end this attempt here (`homelab.node.run.torchrun.mark_stop`); None where it was not."""
    marked_at = (files.read_object(os.path.join(node_dir, "stop")) or {}).get("time")
    return marked_at if isinstance(marked_at, (int, float)) else None


def _rank(folder: str, attempt: int, node_dir: str, rank: JsonObject, request: PollRequest, most: int) -> RankReply:
    number = str(rank["rank"])
    # Lines that the caller has of another attempt do not count for this one.
    lines_read = request.after_lines.get(number, 0) if request.lines_of_attempt in (None, attempt) else 0
    may_begin_anew = request.lines_of_attempt == attempt  # the caller has counted lines; it is not a request without metrics
    home = os.path.join(paths.attempt_dir(folder, attempt), "ranks", number)
    # torchrun names its log folder <rdzv id>_<random>; this attempt has exactly one.
    logs = sorted(glob.glob(os.path.join(glob.escape(node_dir), "logs", "*", "attempt_0", str(rank["local_rank"]))))
    tail_lines = request.tail_lines
    beat = files.read_object(os.path.join(home, "heartbeat.json"))
    printed = {name: files.tail(os.path.join(logs[-1], f"{name}.log"), tail_lines) if logs else [] for name in ("stdout", "stderr")}
    after_bytes = request.after_bytes.get(number, 0) if may_begin_anew else 0
    metrics, end = _metrics(os.path.join(home, "metrics.jsonl"), lines_read, most, may_begin_anew, after_bytes)
    return RankReply(
        heartbeat=message.as_written(beat),
        metrics=message.as_written(metrics),
        metrics_end_bytes=end if may_begin_anew else 0,
        before=message.as_written(_metrics(os.path.join(home, "curves.jsonl"), 0, most)[0] if request.before else ()),
        log_tail=LogTail(stdout=tuple(printed["stdout"]), stderr=(*_warnings_of_nccl(node_dir, beat, tail_lines), *printed["stderr"])),
        error=message.as_written(files.read_object(os.path.join(home, "error.json"))),
    )


def _warnings_of_nccl(node_dir: str, beat: JsonObject | None, lines: int) -> list[str]:
    """What NCCL has warned of in this rank's process: it has a file of its own (NCCL_DEBUG_FILE), in which the version stands, too."""
    pid = (beat or {}).get("pid")
    if type(pid) is not int or lines <= 0:
        return []
    written = glob.glob(os.path.join(glob.escape(node_dir), f"nccl-*-{pid}.log"))
    return [line for path in sorted(written) for line in files.tail(path, lines) if "NCCL WARN" in line]


def _metrics(path: str, after_lines: int, most: int, may_begin_anew: bool = False, after_bytes: int = 0) -> tuple[list[JsonObject], int]:
    """The lines of metrics.jsonl after the first `after_lines`, and where the last of them ends, in bytes. One that is still being written is left
    for the next poll.

    `after_bytes`: where the caller believes that its lines end. If a line ends there, nothing before it is read. With `may_begin_anew` all of
    them where there are fewer: somebody has typed the attempt's commands once more. At most `most`: the first of them for who counts the lines
    and asks for the others next, else the newest.
    """
    if not os.path.isfile(path):  # reading a pipe would wait
        return [], 0
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = after_bytes if 0 < after_bytes <= size and os.pread(stream.fileno(), 1, after_bytes - 1) == b"\n" else None
            if start is None and after_lines <= size:  # a line has a byte
                start = _end_of(stream, after_lines)
            if start is None and not may_begin_anew:
                return [], 0
            stream.seek(start or 0)
            lines = list(itertools.islice(stream, most)) if may_begin_anew else list(collections.deque(stream, most + 1))
    except OSError:
        return [], 0
    whole = [line for line in lines if line.endswith(b"\n")]
    whole = whole if may_begin_anew else whole[-most:]
    return files.json_objects([line.decode("utf-8", "replace") for line in whole]), (start or 0) + sum(map(len, whole))


def _end_of(stream: BinaryIO, lines: int) -> int | None:
    """Where the first `lines` lines end, in bytes; None where there are fewer."""
    end, missing = 0, lines
    while missing > 0:
        chunk = stream.read(1 << 20)
        if not chunk:
            return None
        found = chunk.count(b"\n")
        if found < missing:
            end, missing = end + len(chunk), missing - found
            continue
        place = 0
        for _ in range(missing):
            place = chunk.index(b"\n", place) + 1
        return end + place
    return end
