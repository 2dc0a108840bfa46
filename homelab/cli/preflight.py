"""`homelab preflight`: is this cluster fit to train, and if not, which command mends it?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common

if TYPE_CHECKING:
    from rich.console import RenderableType

    from homelab.control.preflight import Look

_AGAIN_S = 2.0  # between two looks of --watch


def command(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="Also check what this recipe needs: model, data, packages, memory.", show_default=False),
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    only: Annotated[list[str], typer.Option("--only", help="Judge only this check or subject (repeatable).")] = [],  # noqa: B006
    skip: common.SkipOption = [],  # noqa: B006
    deep: Annotated[bool, typer.Option("--deep", help="Also let all nodes compute together: a real all-reduce, timed.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Offer to run the commands that mend what was found.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --fix: do not ask. What needs sudo is left out.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again until nothing fails.")] = False,
    list_checks: Annotated[bool, typer.Option("--list", help="Print all checks and end.")] = False,
    as_json: common.JsonOption = False,
) -> int:
    """Check every node over SSH. Exit code 1 when a check fails, 3 when a node cannot be reached."""
    from dataclasses import replace

    from rich.console import Console

    from homelab.checks import differences, registry, report
    from homelab.config.interpreter import for_recipe
    from homelab.config.load import load_recipe
    from homelab.control import launch, material, preflight
    from homelab.remote.fanout import Fleet

    if list_checks and as_json:
        common.print_json({"checks": [{"id": check.id, "title": check.title, "worst": check.worst} for check in registry.CHECKS]})
        return 0
    if list_checks:
        typer.echo(report.listing(registry.SUBJECTS), nl=False)
        return 0
    _refuse_combinations(fix, yes, watch, as_json)
    loaded = common.load_cluster(cluster, nodes)
    skipped = registry.skipped(only=only, skip=skip)
    wanted = load_recipe(recipe) if recipe else None
    loaded = for_recipe(loaded, wanted)
    names = [node.name for node in loaded.nodes]
    options = common.same_options(cluster)
    console = Console()

    with Fleet(loaded) as fleet:

        def look(say: Callable[[str], None]) -> Look:
            items = material.of_recipe(wanted, recipe) if wanted and recipe else []
            seen = preflight.look(
                fleet, wanted, items, skip=skipped, test_collective="always" if deep else "never", say=say,
                plan_on=lambda seen, settled: launch.make_plan(
                    seen, settled, items, run="preflight", attempt=1, port=settled.parallel.port, resume_step=0
                ),
            )  # fmt: skip
            seen = replace(seen, findings=common.for_cluster(seen.findings, cluster))
            if seen.refused is not None:
                seen.refused.hint = common.for_same_files(seen.refused.hint, cluster)
            return replace(seen, refused=None) if "fit.memory" in skipped else seen

        def drawn(found: Look) -> RenderableType:
            return report.table(found.findings, names, differences.table(found.evidence))

        def looked() -> Look:
            with common.progress(as_json) as say:
                return look(say)

        found = _watch(look, drawn, console) if watch else looked()
        if as_json:
            common.print_json(_document(loaded.name, found, sorted(skipped), differences.table(found.evidence)))
            return _code(found)
        if not watch:
            console.print(drawn(found), soft_wrap=True)
        if fix and _mend(found, console, cluster, ask=not yes):
            found = looked()
            console.print(drawn(found), soft_wrap=True)
    console.print(_next(found, options, recipe, fix, bool(skipped)), soft_wrap=True, markup=False, highlight=False)
    return _code(found)


def _refuse_combinations(fix: bool, yes: bool, watch: bool, as_json: bool) -> None:
    import sys

    from homelab.errors import InputError

    if as_json and (fix or watch):
        option = "--fix" if fix else "--watch"
        raise InputError(f"{option} talks with a person, --json with a program", where=f"{option} --json", hint="leave one of them out")
    if fix and watch:
        raise InputError("--fix asks, --watch does not wait", where="--fix --watch", hint="run --fix in one terminal and --watch in another")
    if yes and not fix:
        raise InputError("--yes answers what --fix asks, and there is no --fix", where="--yes", hint="add --fix")
    if fix and not yes and not sys.stdin.isatty():
        raise InputError("--fix asks before each command, and nobody can answer here", where="stdin is no terminal", hint="add --yes")


def _watch(look: Callable[[Callable[[str], None]], Look], drawn: Callable[[Look], RenderableType], console: object) -> Look:
    """Look until nothing fails; on a terminal the table is drawn anew each time. Ctrl-C ends it."""
    import time

    from rich.console import Console

    from homelab.checks import report

    assert isinstance(console, Console)
    if console.is_terminal:
        console.print("looking", style="dim")
    while True:
        found = look(lambda text: None)
        fine = report.worst(found.findings) != "fail"
        if console.is_terminal or fine:
            console.clear()  # nothing where this is no terminal
            # Not wrapped: the commands are for another terminal, where each must be pasted as one line.
            console.print(drawn(found), soft_wrap=True)
        if fine:
            return found
        if console.is_terminal:
            console.print(f"looked at {time.strftime('%H:%M:%S')}, looking again; Ctrl-C ends this", style="dim", highlight=False)
        time.sleep(_AGAIN_S)


def _mend(found: Look, console: object, cluster: Path, *, ask: bool) -> bool:
    """Run the fixes that the person agrees to; whether any was run. What no command can mend is named."""
    import os
    import subprocess
    import sys

    from rich.console import Console

    from homelab.checks import fixes

    assert isinstance(console, Console)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    # The commands may be ours too: the same homelab, for the same cluster.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}", "HOMELAB_CLUSTER": str(cluster)}
    ran = False
    for offer in fixes.offered(found.findings):
        say(f"\n{offer.title}")
        say(f"  {offer.command}")
        if offer.needs_root:
            say("  this asks for the rights of root (sudo) on that machine")
        if not ask and offer.needs_root:
            say("  not run: --yes leaves out what needs sudo")
            continue
        if ask and not typer.confirm("  run it?", default=False):
            continue
        ran = True
        done = subprocess.run(["/bin/sh", "-c", offer.command], env=environment, check=False)
        say("  done" if done.returncode == 0 else f"  it ended with exit code {done.returncode}")
    left = fixes.by_hand(found.findings)
    if left:
        say("\nFor your own hands, see above: " + ", ".join(dict.fromkeys(f"{f.node or 'this machine'} ({f.check})" for f in left)))
    return ran


def _document(name: str, found: Look, skipped: list[str], differences: list[tuple[str, dict[str, str]]]) -> dict[str, object]:
    from homelab.checks import registry, report

    return {
        "cluster": name,
        "ok": _fit(found),
        "checks": [check.id for check in registry.CHECKS if check.id not in skipped],
        "skipped": skipped,
        "findings": report.as_json(found.findings),
        "differences": {what: values for what, values in differences},
        **({"refused": found.refused.as_dict()} if found.refused is not None else {}),
    }


def _fit(found: Look) -> bool:
    """Nothing fails, and the recipe can be shared out over these nodes."""
    from homelab.checks import report

    return report.worst(found.findings) != "fail" and found.refused is None


def _code(found: Look) -> int:
    from homelab.errors import EXIT_UNREACHABLE

    if any(error.exit_code == EXIT_UNREACHABLE for error in found.evidence.unreachable.values()):
        return EXIT_UNREACHABLE
    return 0 if _fit(found) else 1


def _next(found: Look, options: str, recipe: Path | None, fix: bool, is_part: bool) -> str:
    from homelab.checks import fixes, report
    from homelab.planning.command import file_word

    name = f" {file_word(str(recipe))}" if recipe else ""
    if report.worst(found.findings) != "fail":
        if found.refused is not None:  # a launch would say the same
            what = "The recipe" if recipe else "A training"
            return f"{what} cannot be launched on these nodes: {found.refused.message}\nfix:   {found.refused.hint}"
        if is_part:
            return f"Fit to train, as far as was looked at. All checks: homelab preflight{name}{options}"
        return f"Fit to train. Next: homelab plan{name or ' RECIPE'}{options}"
    runnable = not fix and fixes.offered(found.findings)
    again = f"homelab preflight{name}{' --fix' if runnable else ''}{options}"
    checks = [finding.check for finding in found.findings if finding.level == "fail"]
    return f"Mend what is marked FAIL, then run again: {again}{' (it asks before it runs a command)' if runnable else ''}\nMore of one: homelab explain {checks[0]}"
