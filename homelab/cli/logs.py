"""`homelab logs`: what every rank printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, terminal
from homelab.controller.base.hint import homelab

if TYPE_CHECKING:
    from homelab.controller.features.status.logs import RunLogs

_FOLLOW_INTERVAL_S = 1.0
_LEAST_LINES_FOLLOWED = 400


def command(
    run: common.RunArgument = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this rank.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="The attempt whose output is shown. Default: the newest.", show_default=False)
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="The number of lines of each stream.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay and print new lines.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Every line, also the warnings of torch that repeat or name no error.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Print the last lines of stdout and stderr of every rank, and of torchrun if it printed any. Of the newest attempt, or of the one that you name."""
    from homelab.controller.features.status import logs
    from homelab.controller.remote.fanout import Fleet
    from homelab.controller.run import run_lookup

    with Fleet(common.load_cluster(cluster)) as fleet:
        with common.progress(as_json) as say:
            paths = run_lookup.run(fleet, runs_dir, run, say)

        def read(count: int) -> RunLogs:
            return logs.read(fleet, paths, rank, count, attempt)

        if as_json:
            common.print_json(read(lines).as_dict())
        else:
            _print(read, lines, follow, _Printed(raw), common.same_options(cluster, runs_dir))
    return 0


def _print(read: Callable[[int], RunLogs], lines: int, follow: bool, printed: _Printed, options: str) -> None:
    """The last lines; with `follow` also what comes after them, until the run ends."""
    logs = read(lines)
    terminal.echo(_title(logs, options))
    printed.add(logs, headings=True)
    if not any(printed.tails.values()) and logs.is_final and not logs.unreachable:
        terminal.echo("nothing was printed in it")
    if printed.has_folded:
        terminal.echo(f"Every line: {homelab(f'logs {logs.run} --raw{options}')}")
    while follow and not logs.is_final:
        time.sleep(_FOLLOW_INTERVAL_S)
        before, logs = logs, read(max(lines, _LEAST_LINES_FOLLOWED))
        if logs.attempt != before.attempt:
            terminal.echo(_title(logs, options))
            printed.tails.clear()
        printed.add(logs, headings=False)


def _title(logs: RunLogs, options: str) -> str:
    title = f"attempt {logs.attempt} of {logs.run}"
    if logs.attempt < logs.newest_attempt:
        return f"{title}; the newest is attempt {logs.newest_attempt}: {homelab(f'logs {logs.run}{options}')}"
    if logs.attempt <= 1:
        return title
    return f"{title}, the newest; the one before: {homelab(f'logs {logs.run} --attempt {logs.attempt - 1}{options}')}"


class _Printed:
    """What was printed of each stream: (label, stream) -> its last lines. `raw`: nothing is folded."""

    def __init__(self, raw: bool) -> None:
        self.tails: dict[tuple[str, str], list[str]] = {}
        self.has_folded = False
        self._raw = raw

    def add(self, logs: RunLogs, *, headings: bool) -> None:
        """Print what is new in each stream; with `headings` in blocks, else each line with its label."""
        for number, log in sorted(logs.ranks.items()):
            for stream, lines in (("stdout", log.stdout), ("stderr", log.stderr)):
                self._add(f"rank {number} on {log.node}", stream, lines, headings)
        for node, lines in logs.torchrun.items():
            self._add(f"torchrun on {node}", "stderr", lines, headings)
        for node, why in logs.unreachable.items() if headings else ():
            terminal.echo(f"{node} could not be asked: {why}", err=True)

    def _add(self, label: str, stream: str, lines: list[str], headings: bool) -> None:
        from homelab.controller.dashboard.log_noise import without_noise
        from homelab.controller.features.status.logs import new_lines

        whole = new_lines(self.tails.get((label, stream), []), lines)
        new = whole if self._raw else without_noise(whole)
        self.has_folded |= new != whole
        self.tails[label, stream] = lines
        if new and headings:
            terminal.echo("\n".join([f"--- {label}, {stream}", *new]))
        elif new:
            terminal.echo("\n".join(f"[{label}] {line}" for line in new))
