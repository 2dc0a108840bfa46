"""`homelab why`: why a run failed, who was first, what was done since, and what its owner can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common

if TYPE_CHECKING:
    from homelab.control.why import Why

_EVENTS = 12


def command(
    run: common.RunArgument = None,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", min=1, help="This attempt. Default: the newest that failed.", show_default=False),
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """The first rank that failed, the evidence, and what mends it. Exit code 3 when the nodes that know cannot be asked."""
    from rich.console import Console

    from homelab.control import find, why
    from homelab.diagnose import cause
    from homelab.errors import EXIT_DONE, EXIT_UNREACHABLE
    from homelab.remote.fanout import Fleet

    options = common.same_options(cluster, runs_dir)
    with Fleet(common.load_cluster(cluster)) as fleet, common.progress(as_json) as say:
        paths = find.run(fleet, runs_dir, run, say)
        found = why.look(fleet, paths, attempt, say, options)
    if as_json:
        common.print_json(found.as_dict())
    else:
        console = Console()

        def line(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        line(_first_line(found))
        if found.told is not None:
            console.print(cause.render(found.told.diagnosis))
        for text in _after(found, options):
            line(text)
        line(f"Next: {found.next_command.command}")
    is_unknown = found.state == "lost" and not found.is_kept
    return EXIT_UNREACHABLE if is_unknown else EXIT_DONE


def _first_line(found: Why) -> str:
    if found.told is None:
        if found.state == "failed":
            return f"attempt {found.attempt} of {found.run} failed, and nothing on its nodes says why"
        if found.not_started:
            return f"attempt {found.attempt} of {found.run} did not run: {found.not_started}"
        if found.attempt == found.newest_attempt:
            return f"{found.run} did not fail: it is {found.state}, attempt {found.attempt}, step {found.step}"
        return f"attempt {found.attempt} of {found.run} did not fail: it was {found.state}; the run is {found.run_state}, attempt {found.newest_attempt}"
    first = found.told.diagnosis
    who = first.first_node if first.first_rank is None else f"rank {first.first_rank} on {first.first_node}"
    if not who:  # it is this machine that reaches nobody
        return f"attempt {found.attempt} of {found.run} is {found.state}: {first.title}"
    if found.state == "lost":
        return f"attempt {found.attempt} of {found.run} is lost: not all of its nodes can be asked; first: {who}"
    return f"attempt {found.attempt} of {found.run} failed; first: {who}"


def _after(found: Why, options: str) -> list[str]:
    import time

    lines = []
    if found.is_kept and found.told is not None:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.told.made_at))
        silent = f": {', '.join(found.unreachable)} cannot be asked" if found.unreachable else ""
        lines.append(f"as it was found on {made}; the nodes say less now{silent}")
    elif found.told is None and found.unreachable:
        lines.append(f"could not be asked: {', '.join(f'{name} ({why})' for name, why in found.unreachable.items())}")
    if found.since:
        lines.append("since then")
    lines += [f"  {time.strftime('%H:%M:%S', time.localtime(row.time))}  {row.text}" for row in found.since[-_EVENTS:]]
    if found.told is not None and found.attempt < found.newest_attempt:
        lines.append(f"the run is {found.run_state} now, in attempt {found.newest_attempt}, at step {found.step}")
        if found.run_state in ("starting", "running", "done"):
            lines.append("nothing has to be done for it now: the fix above is for when this comes again")
    lines += found.alone
    if found.told is not None or found.state == "failed":
        which = f" --attempt {found.attempt}" if found.attempt < found.newest_attempt else ""
        lines.append(f"What its ranks printed: homelab logs {found.run}{which}{options}")
    return lines
