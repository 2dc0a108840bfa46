"""`--lanes N`: the tests are collected once, and N forked processes run them, a file at a time.

With a process for each lane that collects by itself, every one of them would import torch and read all tests: half a minute of work.
A file stays together, because its tests share a lab. The files are taken in the order of their collection. A test marked `shares_nothing`
is handed out alone: else the longest file decides how long the whole takes. Trainings are for half of the lanes while there is other work:
each lane that trains imports torch once more for that, ten seconds of a core, and the others wait for machines meanwhile.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import pickle
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, cast

import pytest
from _pytest.runner import runtestprotocol

END_S = 300.0  # after Ctrl-C: as long as a lab may take to go down


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--lanes", type=int, default=0, metavar="N", help="run the tests in N processes that are forked after one collection")


def configure(config: pytest.Config) -> None:
    if config.option.lanes:
        config.pluginmanager.register(Lanes(config, config.option.lanes))


@dataclass
class Lane:
    """One process, as the parent sees it."""

    number: int
    pid: int
    messages: Connection
    running: pytest.Item | None = None
    left: deque[pytest.Item] = field(default_factory=deque)


class Lanes:
    """The parent: hands out files, and passes on what the lanes report."""

    def __init__(self, config: pytest.Config, count: int) -> None:
        self.config, self.count = config, count
        self.numbers = itertools.count(1)
        self.open: list[Lane] = []
        self.files: deque[list[pytest.Item]] = deque()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or self.config.option.collectonly or not session.items:
            return None
        self.files = deque(
            list(items)
            for _, items in itertools.groupby(
                session.items, key=lambda item: item.nodeid if item.get_closest_marker("shares_nothing") else item.path
            )
        )
        cast(Any, self.config)._tmp_path_factory.getbasetemp()
        gc.collect()
        gc.freeze()  # a lane's collector would write to every page that it shares with the others
        try:
            for _ in range(min(self.count, len(self.files))):
                self.start(session, self.files.popleft())
            while self.open:
                self.listen(session)
        except KeyboardInterrupt:
            self.wait_for_the_end()  # each lane has had the Ctrl-C, and takes its labs down
            raise
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True

    def start(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        number = next(self.numbers)
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for lane in self.open:
                lane.messages.close()
            run_lane(session, items, Reports(self.config, theirs, number))
        theirs.close()
        self.open.append(Lane(number, pid, ours, left=deque(items)))

    def listen(self, session: pytest.Session) -> None:
        ready = wait([lane.messages for lane in self.open])
        for lane in [lane for lane in self.open if lane.messages in ready]:
            try:
                kind, value = lane.messages.recv()
            except (EOFError, ConnectionResetError):
                self.ended(session, lane)
                continue
            if kind == "next":
                items = self.next_for(lane)
                lane.left.extend(items)
                lane.messages.send([session.items.index(item) for item in items])
            elif kind == "begins":
                lane.running = lane.left.popleft()
            elif kind == "report":
                self.report(lane, self.config.hook.pytest_report_from_serializable(config=self.config, data=value))
            elif kind == "over":
                lane.running = None
                lane.messages.send(not (session.shouldfail or session.shouldstop))
            else:
                self.config.hook.pytest_warning_recorded.call_historic(kwargs=value)

    def next_for(self, lane: Lane) -> list[pytest.Item]:
        """The first file that is for this lane, or the first one."""
        if not self.files:
            return []
        trains = sorted(each.number for each in self.open).index(lane.number) < (len(self.open) + 1) // 2
        place = next((place for place, items in enumerate(self.files) if trains_models(items) == trains), 0)
        items = self.files[place]
        del self.files[place]
        return items

    def report(self, lane: Lane, report: pytest.TestReport) -> None:
        name = f"lane {lane.number}"  # -v and the text of a failure show whose it is
        cast(Any, report).node = SimpleNamespace(gateway=SimpleNamespace(id=name), _workerinfocache=name)
        self.config.hook.pytest_runtest_logreport(report=report)
        if report.failed:  # its text comes at the end; who waits for minutes, or ends it, knows its name and its first words now
            crash = getattr(report.longrepr, "reprcrash", None)
            words = (crash.message if crash else str(report.longrepr)).strip().partition("\n")[0][:300]
            print(f"\n{report.nodeid}: failed in its {report.when}: {words}", flush=True)

    def ended(self, session: pytest.Session, lane: Lane) -> None:
        """A lane that ends within a test has failed in it; another one goes on behind that test."""
        self.open.remove(lane)
        lane.messages.close()
        code = os.waitstatus_to_exitcode(os.waitpid(lane.pid, 0)[1])
        if lane.running is not None:
            words = f"the process that ran this test ended: {f'signal {-code}' if code < 0 else f'exit code {code}'}"
            where = lane.running.location
            self.report(lane, pytest.TestReport(lane.running.nodeid, where, {}, "failed", words, "call"))
        elif code:
            session.shouldfail = session.shouldfail or f"lane {lane.number} ended with exit code {code} outside of its tests, see above"
        if lane.left and not (session.shouldfail or session.shouldstop):
            self.start(session, list(lane.left))

    def wait_for_the_end(self) -> None:
        while self.open and (ready := wait([lane.messages for lane in self.open], END_S)):
            for lane in [lane for lane in self.open if lane.messages in ready]:
                try:
                    if (kind := lane.messages.recv()[0]) in ("next", "over"):
                        lane.messages.send([] if kind == "next" else False)
                except (EOFError, OSError):
                    self.open.remove(lane)


def trains_models(items: list[pytest.Item]) -> bool:
    """Whether one of these tests forks ranks that train."""
    return any("forks" in getattr(item, "fixturenames", ()) for item in items)


class Reports:
    """What a lane says to its parent. In the lane it takes the place of pytest's own reporting."""

    def __init__(self, config: pytest.Config, messages: Connection, number: int) -> None:
        self.config, self.messages, self.number = config, messages, number
        self.goes_on = True
        self.is_begun = False  # before, pytest repeats the warnings that the parent has

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        self.messages.send(("begins", None))
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            self.messages.send(("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report)))
        self.messages.send(("over", None))
        self.goes_on = self.messages.recv()
        return True

    @pytest.hookimpl
    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any) -> None:
        if not self.is_begun:
            return
        try:
            pickle.dumps(warning_message)
        except Exception:  # its class or its message lives in a test only
            warning_message = warnings.WarningMessage(
                UserWarning(str(warning_message.message)), UserWarning, warning_message.filename, warning_message.lineno
            )
        self.messages.send(("warning", {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}))

    def items(self, session: pytest.Session, first: list[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
        """(item, the one after it). Which file is next is asked before the last test of a file: what both share stays."""
        waiting = deque(first)
        while waiting:
            item = waiting.popleft()
            if not waiting:
                self.messages.send(("next", None))
                waiting.extend(session.items[index] for index in self.messages.recv())
            yield item, waiting[0] if waiting else None


def run_lane(session: pytest.Session, first: list[pytest.Item], reports: Reports) -> None:
    """The whole life of a lane's process."""
    config, code = cast(Any, session.config), 1
    try:
        atexit._clear()  # those of the parent are its own
        os.environ["PYTEST_LANE"] = str(reports.number)
        factory = config._tmp_path_factory
        factory._basetemp = factory.getbasetemp() / f"lane-{reports.number}"
        factory._basetemp.mkdir(0o700)
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are shared with the parent
        capture.start_global_capturing()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(reports)
        reports.is_begun = True
        for item, following in reports.items(session, first):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if not reports.goes_on:
                session._setupstate.teardown_exact(None)
                break
        code = 0
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
        code = 2
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
