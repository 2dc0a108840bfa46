"""Looks at runs while pages show them: one look serves all pages, and no node is asked while no page is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.base.hint import Options
from homelab.controller.config.cluster import Cluster
from homelab.controller.dashboard.run_list import RunRow
from homelab.controller.features.status import monitor, run_index
from homelab.controller.features.web import page_values, unforeseen
from homelab.controller.features.web.run_records import RunRecords
from homelab.controller.features.web.run_source import RunSource, open_run
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_names, store

_PART = 24.0  # so many times the processor time of a look passes before the next: at most 4 % of one core
_OVER_S = 30.0  # between two looks at a run that is over: a person may recover it by hand
_REPORT_S = 10.0
_RUNS_S = 20.0  # between two questions which runs the nodes have
_LINGER_S = 20.0  # connections stay open so long behind the last page: a page may be loaded again
_QUIET_S = 15.0  # a stream says a word at least so often, so that both sides notice its end
_MOST_COMPARED = 6
_MOST_KEPT = 8  # records of runs that no page shows: those of one take up to 16 MB


class Told:
    """What pages are told about one thing: kind of event -> its number and its text, the newest only."""

    def __init__(self) -> None:
        self.events: dict[str, tuple[int, str]] = {}
        self.task: asyncio.Task[None] | None = None
        self._pages: set[asyncio.Event] = set()
        self._arrived = asyncio.Event()
        self._is_hurried = False
        self._count = 0

    @property
    def is_shown(self) -> bool:
        """A page is open."""
        return bool(self._pages)

    def tell(self, kind: str, text: str) -> None:
        """Give it to all pages, unless they have it."""
        if kind not in self.events or self.events[kind][1] != text:
            self._count += 1
            self.events[kind] = (self._count, text)
            self.wake()

    def wake(self) -> None:
        """Let every page look for what is new."""
        for page in self._pages:
            page.set()

    def join(self, page: asyncio.Event, watch: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """One page more; `watch` begins where nobody watches."""
        self._pages.add(page)
        self._arrived.set()
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(watch())

    def part(self, page: asyncio.Event) -> None:
        """One page less."""
        self._pages.discard(page)

    def hurry(self) -> None:
        """What is rested now, or else next, is over at once: something has happened."""
        self._is_hurried = True
        self._arrived.set()

    async def rest(self, seconds: float) -> bool:
        """Wait so long, or until a page comes or somebody hurries; whether that was so."""
        if not self._is_hurried:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), seconds)
            except TimeoutError:
                return False
        self._is_hurried = False
        return True


class Observer:
    """For the pages of one server. All of it runs in the server's event loop; disks and nodes are waited for in threads."""

    def __init__(self, cluster: Cluster, runs_dir: Path, options: Options) -> None:
        self._cluster, self._runs_dir, self._options = cluster, runs_dir, options
        self._runs: dict[str, tuple[RunSource, Told]] = {}
        self._opening = asyncio.Lock()
        self._all = Told()
        self._records: dict[str, RunRecords] = {}
        self._is_closing = False

    async def run(self, name: str) -> str:
        """The whole name of a run, which can be followed from now on. Raises HomelabError where nobody knows it."""
        async with self._opening:
            if name in self._runs:
                return name
            try:
                source = await asyncio.to_thread(open_run, self._cluster, self._runs_dir, name, self._options, self._records)
            except UnreachableError as error:  # it is not here, and no node could be asked for it
                raise run_names.unknown(name, self.names()) from error
            if source.name in self._runs:
                await asyncio.to_thread(source.leave)
            else:
                self._runs[source.name] = (source, Told())
            return source.name

    def names(self) -> list[str]:
        """The runs of this machine, the newest first; none while their folder cannot be read, which the error that is told then says."""
        try:
            return [row.name for row in run_index.kept_here(self._runs_dir)]
        except HomelabError:
            return []

    async def follow(self, name: str | None) -> AsyncGenerator[tuple[str, str], None]:
        """(kind, text) of every event about all runs, and about the one that `run` has found, until the page leaves; ("", "") says only that we are there."""
        topics = [self._all] if name is None else [self._all, self._runs[await self.run(name)][1]]
        page, told = asyncio.Event(), dict[tuple[int, str], int]()
        if self._is_closing:
            return
        self._all.join(page, self._watch_all)
        if name is not None:
            topics[1].join(page, lambda: self._watch(name))
        try:
            while not self._is_closing:
                page.clear()
                for place, topic in enumerate(topics):
                    for kind, (number, text) in list(topic.events.items()):
                        if told.get((place, kind)) != number:
                            told[place, kind] = number
                            yield kind, text
                try:
                    await asyncio.wait_for(page.wait(), _QUIET_S)
                except TimeoutError:
                    yield "", ""
        finally:
            for topic in topics:
                topic.part(page)

    def look_soon(self, name: str) -> None:
        """Something was done with this run: pages that show it are told how it is then."""
        if name in self._runs and self._runs[name][1].is_shown:
            self._runs[name][1].hurry()

    async def logs(self, name: str, attempt: int) -> str:
        """The logs of an attempt. Raises HomelabError."""
        found = await self.run(name)
        return await asyncio.to_thread(self._runs[found][0].logs, attempt)

    async def compared(self, names: list[str]) -> str:
        """The losses of these runs, of those that this machine has in its records."""
        here = {paths.name: paths for paths in store.runs_in(self._runs_dir)}
        found = {}
        for name in [name for name in dict.fromkeys(names) if name in here][:_MOST_COMPARED]:
            records = self._records.pop(name) if name in self._records else RunRecords(here[name], self._cluster)
            self._records[name] = records
            found[name] = (await asyncio.to_thread(records.report)).curves
        self._forget()
        return page_values.compared(found)

    def _forget(self) -> None:
        """What was read of runs that no page shows, but of the last few: a server may run for weeks."""
        for name in [name for name in list(self._records) if name not in self._runs][:-_MOST_KEPT]:
            self._records.pop(name, None)

    async def close(self) -> None:
        """End what is under way, and all connections."""
        self._is_closing = True
        for topic in (self._all, *(topic for _, topic in self._runs.values())):
            topic.wake()
            if topic.task is not None:
                topic.task.cancel()
        for source, _ in self._runs.values():
            await asyncio.to_thread(source.leave)

    async def _watch(self, name: str) -> None:
        """One run, as long as a page shows it, and a little longer."""
        source, topic = self._runs[name]
        try:
            snapshot, report = await asyncio.to_thread(source.recorded)
            topic.tell("run", page_values.run(snapshot, is_asked=False, is_mute=source.records.is_mute))
            topic.tell("report", page_values.report(report))
            if source.records.is_long:  # that was a first look
                report = await asyncio.to_thread(source.records.report)
                topic.tell("report", page_values.report(report))
            reported_at_s = float("-inf")  # the first look may bring all that the nodes have measured
            trouble = "null"  # of the newest report
            while topic.is_shown or await topic.rest(_LINGER_S):
                began_s = time.process_time()
                is_over = await self._look(source, topic, trouble)
                if is_over or time.monotonic() - reported_at_s >= _REPORT_S:
                    reported_at_s = time.monotonic()
                    try:
                        newer, trouble = await asyncio.to_thread(source.report), "null"
                    except HomelabError as error:
                        newer, trouble = report, _failed(error)
                        topic.tell("trouble", trouble)
                    if newer is not report:
                        topic.tell("report", page_values.report(newer))
                    report = newer
                await asyncio.sleep(monitor.INTERVAL_S)
                used_s = time.process_time() - began_s
                await topic.rest(max(_OVER_S if is_over else 0.0, _PART * used_s - monitor.INTERVAL_S))
        except KeyboardInterrupt:  # it was left
            return
        except Exception as error:  # noqa: BLE001 - its folder is damaged, or a mistake of ours: whoever looks at the page has to know
            topic.tell("trouble", _failed(error))
        self._runs.pop(name)
        self._records[name] = self._records.pop(name, source.records)  # the last that was shown is the last to go
        self._forget()
        await asyncio.to_thread(source.leave)

    async def _look(self, source: RunSource, topic: Told, otherwise: str) -> bool:
        """Tell the pages what the nodes say, and the trouble `otherwise` where the look has none; whether nothing more is expected of them soon."""
        if source.is_settled:
            if "logs" not in topic.events:  # the only thing that the records do not have
                try:
                    topic.tell("logs", await asyncio.to_thread(source.logs, None))
                except HomelabError as error:
                    otherwise = _failed(error)
            topic.tell("trouble", otherwise)
            return True
        try:
            snapshot = await asyncio.to_thread(source.look)
        except HomelabError as error:
            topic.tell("trouble", _failed(error))
            return True
        topic.tell("run", page_values.run(snapshot, is_asked=True, is_mute=source.records.is_mute))
        topic.tell("logs", page_values.logs(snapshot))
        topic.tell("trouble", otherwise)
        return snapshot.is_over

    async def _watch_all(self) -> None:
        """The list of runs, as long as a page is open: at once as this machine has it, then as the nodes tell it."""
        topic, fleet = self._all, Fleet(self._cluster)
        try:
            while topic.is_shown:
                try:
                    self._tell_all(await asyncio.to_thread(run_index.kept_here, self._runs_dir), None)
                    index = await asyncio.to_thread(run_index.all_runs, fleet, self._runs_dir, lambda text: None)
                except HomelabError as error:  # the folder of the runs cannot be read, as after a sleep: it may be again
                    topic.tell("trouble of all", _failed(error))
                else:
                    self._tell_all(index.rows, {name: error.message for name, error in index.unreachable.items()})
                    topic.tell("trouble of all", "null")
                await asyncio.sleep(_RUNS_S)
        except Exception as error:  # noqa: BLE001 - as in _watch
            topic.tell("trouble of all", _failed(error))
        finally:
            fleet.__exit__()

    def _tell_all(self, rows: Sequence[RunRow], silent: Mapping[str, str] | None) -> None:
        nodes = [node.name for node in self._cluster.nodes]
        text = page_values.overview(rows, nodes, silent or {}, time.time(), self._options, is_asked=silent is not None)
        if silent is not None or not self._all.events:  # what the nodes said before is better than the records
            self._all.tell("overview", text)


def _failed(error: Exception) -> str:
    """What a page says of an error."""
    known = unforeseen.as_homelab_error(error)
    return page_values.failed(known.message, known.where, str(known.hint))
