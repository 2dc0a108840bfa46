"""`homelab preflight`: is this cluster fit to train, and if not, which command fixes it?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, completion, terminal
from homelab.controller.base.hint import with_options

if TYPE_CHECKING:
    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.config.recipe import Recipe
    from homelab.controller.features.preflight.preflight import PreflightResult
    from homelab.controller.remote.fanout import Fleet

_AGAIN_S = 2.0  # between two looks of --watch


def command(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="Also check what this recipe needs: model, data, packages, memory.", show_default=False, autocompletion=completion.recipes
        ),
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    only: Annotated[
        list[str], typer.Option("--only", help="Run only this check or subject (repeatable).", autocompletion=completion.checks)
    ] = [],  # noqa: B006
    skip: common.SkipOption = [],  # noqa: B006
    deep: Annotated[bool, typer.Option("--deep", help="Also test a real all-reduce over all nodes, with its time.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Offer to run the commands that fix what was found.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --fix: do not ask. Commands with sudo are left out.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat the checks until nothing fails.")] = False,
    list_checks: Annotated[bool, typer.Option("--list", help="List all checks and end.")] = False,
    as_json: common.JsonOption = False,
) -> int:
    """Check every node over SSH. Exit code 1 when a check fails, 3 when a node cannot be reached."""
    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.checks import registry
    from homelab.controller.config.interpreter import for_recipe
    from homelab.controller.config.load import load_recipe
    from homelab.controller.remote.fanout import Fleet

    if list_checks:
        return _list(as_json)
    _refuse_combinations(fix, yes, watch, as_json)
    loaded = common.load_cluster(cluster, nodes)
    skipped = registry.skipped(only=only, skip=skip)
    loaded_recipe = load_recipe(recipe) if recipe else None
    with Fleet(for_recipe(loaded, loaded_recipe)) as fleet:
        preflight = _Preflight(fleet, cluster, loaded_recipe, recipe, skipped, deep, as_json, CleanConsole())
        look = preflight.until_nothing_fails() if watch else preflight.once()
        if as_json:
            common.print_json(preflight.document(look))
            return _code(look)
        if not watch:
            preflight.show(look)
        if fix and _run_fixes(look, cluster, ask=not yes):
            look = preflight.once()
            preflight.show(look)
    terminal.echo(preflight.next_command(look, fix=fix))
    return _code(look)


@dataclass(frozen=True)
class _Preflight:
    """What is asked of which nodes, and where the answer is shown."""

    fleet: Fleet
    cluster_file: Path
    recipe: Recipe | None
    recipe_file: Path | None
    skipped: frozenset[str]
    deep: bool
    as_json: bool
    console: CleanConsole

    def once(self) -> PreflightResult:
        """One look, with its progress on stderr."""
        with common.progress(self.as_json) as say:
            return self._look(say)

    def until_nothing_fails(self) -> PreflightResult:
        """Looks until nothing fails; on a terminal the table is drawn anew each time. Ctrl-C ends it."""
        import time

        from homelab.controller.checks import presentation

        if self.console.is_terminal:
            self.console.print("looking", style="dim")
        while True:
            look = self._look(lambda text: None)
            is_well = presentation.worst(look.findings) != "fail"
            if self.console.is_terminal or is_well:
                self.console.clear()  # nothing where this is no terminal
                self.show(look)
            if is_well:
                return look
            if self.console.is_terminal:
                self.console.print(f"checked at {time.strftime('%H:%M:%S')}, repeating; Ctrl-C ends this", style="dim", highlight=False)
            time.sleep(_AGAIN_S)

    def _look(self, say: Callable[[str], None]) -> PreflightResult:
        from homelab.controller.attempt import inputs
        from homelab.controller.features.preflight import preflight

        items = inputs.of_recipe(self.recipe, self.recipe_file) if self.recipe and self.recipe_file else []
        look = preflight.look(
            self.fleet, self.recipe, items, skip=self.skipped, test_collective="always" if self.deep else "never", say=say,
            run_name=lambda evidence: "preflight",
        )  # fmt: skip
        look = replace(look, findings=common.for_same_files(look.findings, self.cluster_file, recipe=self.recipe_file))
        if look.refused is not None:
            look.refused.hint = with_options(look.refused.hint, common.options_of(self.cluster_file))
        return replace(look, refused=None) if "fit.memory" in self.skipped else look

    def show(self, look: PreflightResult) -> None:
        """Print the answer and the table. Its lines are not wrapped: each command can be pasted into another terminal."""
        from homelab.controller.checks import presentation
        from homelab.controller.checks.machine import version_drift

        names = [node.name for node in self.fleet.cluster.nodes]
        refused = "" if look.refused is None else look.refused.message
        self.console.print(presentation.answer(look.findings, names, refused=refused, is_all=not self.skipped), soft_wrap=True)
        self.console.print(presentation.table(look.findings, names, version_drift.table(look.evidence)), soft_wrap=True)

    def document(self, look: PreflightResult) -> dict[str, object]:
        """The answer of `--json`."""
        from homelab.controller.checks import presentation, registry
        from homelab.controller.checks.machine import version_drift

        return {
            "cluster": self.fleet.cluster.name,
            "ok": _is_fit(look),
            "checks": [check.id for check in registry.CHECKS if check.id not in self.skipped],
            "skipped": sorted(self.skipped),
            "findings": presentation.as_json(look.findings),
            "differences": dict(version_drift.table(look.evidence)),
            **({"refused": look.refused.as_dict()} if look.refused is not None else {}),
        }

    def next_command(self, look: PreflightResult, *, fix: bool) -> str:
        """What to run next."""
        from homelab.controller.base.shell import file_word
        from homelab.controller.checks import presentation

        name = f" {file_word(str(self.recipe_file))}" if self.recipe_file else ""
        cluster = self.fleet.cluster
        options = common.same_options(self.cluster_file, nodes=",".join(node.name for node in cluster.nodes) if cluster.left_out else "")
        if presentation.worst(look.findings) != "fail":
            if look.refused is not None:  # a launch would say the same
                return f"fix:   {look.refused.hint}"
            busy = next((finding for finding in look.findings if finding.is_busy), None)
            if busy is not None:
                return str(with_options(busy.hint, common.options_of(self.cluster_file)))
            if self.skipped:
                return f"All checks: homelab preflight{name}{options}"
            return f"Next: homelab plan{name or ' RECIPE'}{options}"
        runnable = not fix and presentation.offered_fixes(look.findings)
        again = f"homelab preflight{name}{' --fix' if runnable else ''}{options}"
        check = next(finding.check for finding in look.findings if finding.level == "fail")
        asks = " (it asks before it runs a command)" if runnable else ""
        return f"Fix the lines that are marked FAIL, then run again: {again}{asks}\nTo read one: homelab explain {check}"


def _list(as_json: bool) -> int:
    from homelab.controller.checks import presentation, registry

    if as_json:
        common.print_json({"checks": [{"id": check.id, "title": check.title, "worst": check.worst} for check in registry.CHECKS]})
    else:
        terminal.piece(presentation.listing(registry.SUBJECTS))
    return 0


def _refuse_combinations(fix: bool, yes: bool, watch: bool, as_json: bool) -> None:
    import sys

    from homelab.controller.base.errors import InputError

    if as_json and (fix or watch):
        option = "--fix" if fix else "--watch"
        raise InputError(f"{option} is for a person, --json for a program", where=f"{option} --json", hint="leave one of them out")
    if fix and watch:
        raise InputError(
            "--fix waits for answers, and --watch does not", where="--fix --watch", hint="run --fix in one terminal and --watch in another"
        )
    if yes and not fix:
        raise InputError("--yes answers the questions of --fix, but --fix is missing", where="--yes", hint="add --fix")
    if fix and not yes and not sys.stdin.isatty():
        raise InputError(
            "--fix asks before each command, but there is no terminal to answer", where="stdin is no terminal", hint="add --yes"
        )


def _run_fixes(look: PreflightResult, cluster: Path, *, ask: bool) -> bool:
    """Run the fixes that the person agrees to; whether any was run. What no command can fix is named."""
    import os
    import sys

    from homelab.controller.checks import presentation
    from homelab.controller.run import hub_token

    # The commands may be ours too: the same homelab, for the same cluster.
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "HOMELAB_CLUSTER": str(cluster),
    }
    ran = False
    for offer in presentation.offered_fixes(look.findings):
        terminal.echo(f"\n{offer.title}")
        terminal.echo(f"  {offer.command}")
        if offer.command.needs_root:
            terminal.echo("  this command needs root (sudo) on that machine")
        if not ask and offer.command.needs_root:
            terminal.echo("  not run: --yes leaves out commands with sudo")
            continue
        if ask and not terminal.confirm("  run it?"):
            continue
        ran = True
        with hub_token.lent(environment) as (given, descriptors):
            code = _run(offer.command, given, descriptors)
        terminal.echo("  done" if code == 0 else f"  the command ended with exit code {code}")
    by_hand = presentation.fixed_by_hand(look.findings)
    if by_hand:
        terminal.echo(
            "\nTo be fixed by hand, see above: " + ", ".join(dict.fromkeys(f"{f.node or 'this machine'} ({f.check})" for f in by_hand))
        )
    return ran


def _run(command: str, environment: dict[str, str], descriptors: tuple[int, ...]) -> int:
    """The exit code. The command has this terminal for questions and answers (sudo, ssh), and what it prints is cleaned: a node says it."""
    import subprocess

    with subprocess.Popen(
        ["/bin/sh", "-c", command], env=environment, pass_fds=descriptors, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        terminal.relay(process)
    return process.returncode


def _is_fit(look: PreflightResult) -> bool:
    """Nothing fails, and the recipe can be shared out over these nodes."""
    from homelab.controller.checks import presentation

    return presentation.worst(look.findings) != "fail" and look.refused is None


def _code(look: PreflightResult) -> int:
    from homelab.controller.base.errors import EXIT_UNREACHABLE

    if any(error.exit_code == EXIT_UNREACHABLE for error in look.evidence.unreachable.values()):
        return EXIT_UNREACHABLE
    return 0 if _is_fit(look) else 1
