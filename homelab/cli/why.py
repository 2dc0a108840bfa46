"""`homelab why`: why a run failed, which rank failed first, what has happened since, and the command that fixes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, terminal

if TYPE_CHECKING:
    from homelab.controller.features.status.failure import Why

_EVENTS = 12


def command(
    run: common.RunArgument = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="This attempt. Default: the newest that failed.", show_default=False)
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Show the first rank that failed, the evidence, and the fix. Exit code 3 if the nodes that know it cannot be reached."""
    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.base.errors import EXIT_DONE, EXIT_UNREACHABLE
    from homelab.controller.diagnose import cause
    from homelab.controller.features.status import failure

    options = common.same_options(cluster, runs_dir)
    with common.fleet_of_run(run, cluster, runs_dir, as_json) as (fleet, paths, say):
        answer = failure.look(fleet, paths, attempt, say).with_options(common.options_of(cluster, runs_dir))
    if as_json:
        common.print_json(answer.as_dict())
    else:
        terminal.echo(_first_line(answer))
        if answer.stored is not None:
            CleanConsole().print(cause.render(answer.stored.diagnosis))
        for text in (*_after(answer, options), f"Next: {answer.next_command.command}"):
            terminal.echo(text)
    is_unknown = answer.state == "lost" and not answer.is_kept
    return EXIT_UNREACHABLE if is_unknown else EXIT_DONE


def _first_line(answer: Why) -> str:
    if answer.stored is None:
        if answer.state == "failed":
            return f"attempt {answer.attempt} of {answer.run} failed, and nothing on its nodes says why"
        if answer.not_started:
            return f"attempt {answer.attempt} of {answer.run} did not run: {answer.not_started}"
        if answer.attempt == answer.newest_attempt:
            return f"{answer.run} did not fail: it is {answer.state}, attempt {answer.attempt}, step {answer.step}"
        return f"attempt {answer.attempt} of {answer.run} did not fail: it was {answer.state}; the run is {answer.run_state}, attempt {answer.newest_attempt}"
    first = answer.stored.diagnosis
    culprit = first.first_node if first.first_rank is None else f"rank {first.first_rank} on {first.first_node}"
    if not culprit:  # it is this machine that reaches nobody
        return f"attempt {answer.attempt} of {answer.run} is {answer.state}: {first.title}"
    if answer.state == "lost":
        return f"attempt {answer.attempt} of {answer.run} is lost: not all of its nodes can be asked; first: {culprit}"
    return f"attempt {answer.attempt} of {answer.run} failed; first: {culprit}"


def _after(answer: Why, options: str) -> list[str]:
    import time

    from homelab.controller.run import leave

    lines = []
    if answer.is_kept and answer.stored is not None:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(answer.stored.made_at))
        silent = f": {', '.join(answer.unreachable)} cannot be asked" if answer.unreachable else ""
        lines.append(f"as it was found on {made}; the nodes know less now{silent}")
    elif answer.stored is None and answer.unreachable:
        lines.append(f"could not be asked: {', '.join(f'{name} ({why})' for name, why in answer.unreachable.items())}")
    if answer.since:
        lines.append("since then")
    lines += [f"  {time.strftime('%H:%M:%S', time.localtime(row.time))}  {row.text}" for row in answer.since[-_EVENTS:]]
    if answer.stored is not None and answer.attempt < answer.newest_attempt:
        lines.append(f"the run is {answer.run_state} now, in attempt {answer.newest_attempt}, at step {answer.step}")
        if answer.run_state in ("starting", "running", "done"):
            lines.append("nothing needs to be done now: the fix above is for the next time")
    lines += [leave.sentence(row.name, leave.Away(row.until, row.because)) for row in answer.given_back]
    lines += answer.alone
    if answer.stored is not None or answer.state == "failed":
        option = f" --attempt {answer.attempt}" if answer.attempt < answer.newest_attempt else ""
        lines.append(f"What its ranks printed: homelab logs {answer.run}{option}{options}")
    return lines
