"""Whether this node's owner wants it: its processes, the file that a person makes, its cards and its seats, looked at while an attempt runs.

Files, /proc, and `nvidia-smi` and `loginctl` where cluster.toml asks for them; `homelab.node.run.house_signs` says what counts. Whatever was on
a card when the attempt was first looked at is kept in house.json beside its logs: a desktop that was there before wants nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import attempt_records, house_signs
from homelab.node.run.house_signs import RunningProgram
from homelab.node.system import processes, programs
from homelab.shared.protocol import files, layout, phases
from homelab.shared.protocol.house_messages import House, HouseSign

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Any

    from homelab.shared.protocol.house_messages import HouseRequest
    from homelab.shared.protocol.rank_messages import RankStatus
    from homelab.shared.protocol.run_requests import FollowRequest

LOOK_S = 1.0
_PROGRAMS_EVERY = 2  # looks
_ANSWER_S = 8.0
_COMPUTE = ("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
_MEMORY = ("--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits")
_DRAW = ("pmon", "-c", "1", "-s", "um")
_SEATS = "/run/systemd/sessions"
_SEAT_KEYS = "Remote,Class,Type,Active,IdleHint,IdleSinceHint,LockedHint"
_MOST_SEATS = 16
_MOST_PARENTS = 24
_PAUSE_S, _PAUSE_MOST_S = 60.0, 3600.0


def look(request: HouseRequest) -> House:
    """One look at a node on which no attempt is followed."""
    run = request.run
    folder = paths.run_dir(request.workdir, run) if run else ""
    newest = paths.newest_attempt(folder) if folder else 0
    here = paths.node_dir(folder, newest, paths.name_here(folder, newest, request.node)) if newest else ""
    watch = HouseWatch(request, folder, newest, here)
    if newest and processes.of_run(run or "", request.workdir, request.node):
        watch.phases = (phases.STARTING,)  # how much of a card is its own is not told
    return watch.look(asks_programs=True)


class HouseWatch:
    """`seen` is the newest look of a thread of its own: a driver that hangs does not hold up the status lines. A context manager."""

    def __init__(self, request: HouseRequest | FollowRequest, folder: str, attempt: int, here: str) -> None:
        self.seen: House | None = None
        self.phases: tuple[str, ...] = ()
        self._request, self._folder, self._attempt = request, folder, attempt
        self._kept = os.path.join(here, layout.HOUSE_JSON) if here else ""
        self._asked = os.path.join(paths.expand(request.workdir), layout.YIELD)
        name = os.path.basename(here)
        ranks = [rank for rank in attempt_records.plan(folder, attempt)["ranks"] if rank["node"] == name] if here else []
        self._ranks = [int(rank["rank"]) for rank in ranks]
        self._cards = frozenset(rank["card"] for rank in ranks if isinstance(rank.get("card"), str))
        self._smi = programs.path_of("nvidia-smi") if request.yield_when == "gpu" else None
        self._asks_from_s, self._pause_s = 0.0, _PAUSE_S
        self._loginctl = programs.path_of("loginctl") if request.yield_when == "input" else None
        self._names: dict[int, tuple[str, frozenset[str]]] = {}
        self._slow: tuple[HouseSign, ...] = ()
        self._ended = threading.Event()

    def __enter__(self) -> HouseWatch:
        threading.Thread(target=self._watch, daemon=True, name="house").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def hear(self, ranks: Mapping[int, RankStatus]) -> None:
        """What our own ranks do."""
        self.phases = tuple(rank.phase for rank in ranks.values() if rank.has_begun and not rank.is_dead and rank.phase != phases.DONE)

    def look(self, *, asks_programs: bool) -> House:
        """All signs of now. `asks_programs`: nvidia-smi and loginctl, too; else their last answers count."""
        signs = [HouseSign(kind="asked")] if os.path.exists(self._asked) else []
        if self._request.yield_to:
            wanted = house_signs.named(self._processes(), self._request.yield_to)
            wanted.sort(key=lambda one: processes.born(one[1].pid) or 0)
            signs += [
                HouseSign(kind="program", name=name, pid=one.pid)
                for name, one in wanted
                if processes.is_alive(one.pid) and not _is_ours(one.pid)
            ]
        if asks_programs:
            self._slow = (*self._card_signs(), *self._seat_signs())
        clock = time.localtime()
        return House(minute=clock.tm_hour * 60 + clock.tm_min, signs=house_signs.bounded([*signs, *self._slow]))

    def _watch(self) -> None:
        count = 0
        while not self._ended.is_set():
            self.seen = self.look(asks_programs=count % _PROGRAMS_EVERY == 0)
            count += 1
            self._ended.wait(LOOK_S)

    def _processes(self) -> Iterator[RunningProgram]:
        """All of the machine but this one. What a process is called is read once, and again when it has become another program."""
        before, self._names = self._names, {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            pid = int(entry)
            comm = files.text(f"/proc/{entry}/comm")
            if pid in before and before[pid][0] == comm:
                self._names[pid] = before[pid]
            else:
                first = processes.command_line(pid).split(" ", 1)[0]
                self._names[pid] = comm, frozenset(word for word in (comm, os.path.basename(first)) if word)
            yield RunningProgram(pid, self._names[pid][1])

    def _card_signs(self) -> list[HouseSign]:
        computing = self._said(_COMPUTE) if self._kept else None  # who was there before is not known without an attempt
        if computing is None:
            return []
        uses = house_signs.computing(computing)
        memory = self._said(_MEMORY) or ""
        uuids = dict(row.split(", ")[:2] for row in memory.splitlines() if row.count(", ") == 2)
        uses += house_signs.drawing(self._said(_DRAW) or "", uuids)
        births = {use.pid: processes.born(use.pid) for use in uses}
        own = {pid for pid in births if births[pid] is None or _is_ours(pid)}  # of another PID namespace: nothing is known of it
        told = any(use.memory_bytes for use in uses if use.pid in own and births[use.pid] is not None)
        kept = self._start(births, self._others_bytes(memory, told=told))
        known = own | {pid for pid, born in births.items() if kept["processes"].get(str(pid)) == born}
        signs = []
        for use in house_signs.on_cards(uses, self._cards, known):
            name = files.text(f"/proc/{use.pid}/comm")
            signs.append(HouseSign(kind="card", name=name[:64], pid=use.pid))
        others, before = self._others_bytes(memory, told=told), kept["others_bytes"]
        if not signs and others is not None and before is not None and others - before > house_signs.TAKEN_BYTES:
            signs.append(HouseSign(kind="memory"))
        return signs

    def _start(self, births: Mapping[int, int | None], others: int | None) -> dict[str, Any]:
        """What was there at the first look of this attempt."""
        kept = files.read_object(self._kept)
        there = {} if kept is not None else {str(pid): born for pid, born in births.items() if not _is_ours(pid)}
        said, before = (kept or {}).get("processes"), (kept or {}).get("others_bytes")
        found: dict[str, Any] = {"processes": said if isinstance(said, dict) else there}
        found["others_bytes"] = before if isinstance(before, int) else others if self.phases else None
        if found != kept:
            with contextlib.suppress(OSError):  # a full disk, or a run whose folder is gone
                files.replace(self._kept, (json.dumps(found) + "\n").encode())
        return found

    def _others_bytes(self, memory: str, *, told: bool) -> int | None:
        """What others hold of the cards, where the driver does not tell who: all that is used, less what our ranks say of themselves. None: not known."""
        used = house_signs.used_memory(memory, self._cards)
        if told or used is None or not self._ranks or not self._cards:
            return None
        if not self.phases:
            return used
        own = [self._own_bytes(rank) for rank in self._ranks]
        is_steady = all(phase in (phases.TRAINING, phases.EVALUATING, phases.SAVING) for phase in self.phases)
        return used - sum(own) if is_steady and len(self.phases) == len(own) and all(own) else None

    def _own_bytes(self, rank: int) -> int:
        """What a rank has of its card, by its newest step; 0 before that."""
        path = os.path.join(self._folder, layout.rank(self._attempt, rank), layout.METRICS_JSONL)
        said = [line.get("memory_bytes") for line in files.json_objects(files.tail(path, 4, 16 << 10)) if line.get("kind") == "train"]
        return said[-1] if said and isinstance(said[-1], int) else 0

    def _seat_signs(self) -> list[HouseSign]:
        try:
            seats = [name for name in sorted(os.listdir(_SEATS)) if name.isalnum()][:_MOST_SEATS] if self._loginctl else []
            if not seats or self._loginctl is None:
                return []
            _, output, _ = programs.answer_of([self._loginctl, "show-session", *seats, "-p", _SEAT_KEYS], _ANSWER_S)
        except (OSError, TimeoutError):
            return []
        return [HouseSign(kind="input")] if house_signs.is_at_input(output) else []

    def _said(self, words: Collection[str]) -> str | None:
        """The driver's answer; None where there is none. A question that hangs leaves its program behind: the next one is asked after a minute, then after
        twice the time.
        """
        if self._smi is None or time.monotonic() < self._asks_from_s:
            return None
        try:
            code, output, _ = programs.answer_of([self._smi, *words], _ANSWER_S)
        except (OSError, TimeoutError):
            self._asks_from_s, self._pause_s = time.monotonic() + self._pause_s, min(2 * self._pause_s, _PAUSE_MOST_S)
            return None
        self._pause_s = _PAUSE_S
        return output if code == 0 else None


def _is_ours(pid: int) -> bool:
    """Whether a process belongs to a run, or was started by this program: a check of a card computes on it, too."""
    for _ in range(_MOST_PARENTS):
        if processes.run_of(pid) is not None or "-m homelab.node " in processes.command_line(pid) + " ":
            return True
        try:
            pid = int(files.text(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()[1])
        except (IndexError, ValueError):
            return False
        if pid <= 1:
            return False
    return False
