"""`homelab recover`: report what happened, and continue from the newest complete checkpoint on the healthy nodes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, completion, terminal
from homelab.cli.questions import asked
from homelab.cli.run_command import RunCommand
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab, with_options

if TYPE_CHECKING:
    from homelab.controller.features.recover.examine import Examination
    from homelab.controller.features.recover.recover_run import Recovered
    from homelab.controller.run.adoption import AdoptedProgram


def command(
    run: common.RunArgument = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    from_scratch: Annotated[
        bool,
        typer.Option("--from-scratch", help="Start again at step 0. Checkpoints are moved to checkpoints.unused/ in the run's folder."),
    ] = False,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            help="Continue with this strategy, in later attempts too. The loss curve stays the same.",
            show_default=False,
            autocompletion=completion.strategies,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Continue a run that another machine launched, without a question.")] = False,
    wait: common.WaitOption = False,
    supervise: common.SuperviseOption = "here",
    no_supervise: common.NoSuperviseOption = False,
    skip: common.SkipOption = [],  # noqa: B006
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Find the cause of a failure, make a new plan for the healthy nodes, and start the next attempt."""
    from homelab.controller.checks import registry
    from homelab.controller.features.recover import strategy_change
    from homelab.controller.features.recover.recover_run import RecoverRequest, recover_run
    from homelab.controller.remote.fanout import Fleet

    strategy_change.refuse_unknown(strategy, run)
    view = _View(cluster, runs_dir, as_json, yes)
    names = [node.name for node in common.load_cluster(cluster, nodes).nodes]
    request = RecoverRequest(
        run,
        names,
        cluster,
        runs_dir,
        registry.skipped(only=[], skip=skip),
        common.supervise_where(supervise, no_supervise),
        "always" if from_scratch else "never",
        strategy,
    )
    with Fleet(common.load_cluster(cluster)) as fleet:
        try:
            paths = recover_run(fleet, request, view)
        except HomelabError as error:  # a recovery that it proposes is the one that was asked for, and a little more
            typed = [("--nodes", nodes), ("--strategy", strategy), *(("--skip", check) for check in skip)]
            kept = "".join(f" {name} {shlex.quote(value)}" for name, value in typed if value and name not in (error.hint or ""))
            kept += " --from-scratch" if from_scratch and "--from-scratch" not in (error.hint or "") else ""
            error.hint = with_options(error.hint or "", lambda name: kept if name == "recover" else "")
            raise
        return view.wait(fleet, paths) if wait else 0


@dataclass
class _View(RunCommand):
    """See `homelab.controller.features.recover.recover_run.RecoverView`."""

    yes: bool

    def examined(self, examination: Examination, notes: Sequence[Hint]) -> None:
        """The diagnosis, and which files were changed since the launch."""
        from homelab.controller.diagnose import cause

        if self.as_json:
            return
        if examination.diagnosis is not None:
            self.console.print(cause.render(examination.diagnosis.with_options(self.command_options)))
        for note in notes:
            self.line(note.with_options(self.command_options))

    def accepts(self, program: AdoptedProgram) -> bool:
        """The program is shown; `--yes` answers."""
        terminal.echo(f"this machine did not launch {program.run}; what it runs comes from {', '.join(program.nodes)}", err=True)
        for line in program.lines:
            terminal.echo(f"  {line}", err=True)
        hint = Hint("read the lines above; if the nodes may run it: {}", homelab("recover --yes", program.run)).with_options(
            self.command_options
        )
        ask = "May the nodes run it?"
        return self.yes or asked(lambda: terminal.confirm(ask, err=True), "whether the nodes may run it", program.run, hint)

    def resumed(self, resumed: Recovered) -> None:
        """The new attempt, and the command that comes next."""
        from homelab.controller.run import events

        plan, name, diagnosis, options = resumed.plan, resumed.paths.name, resumed.examination.diagnosis, self.command_options
        nodes = [node.name for node in plan.nodes]
        if self.as_json:
            self.json({
                "run": name, "attempt": plan.attempt, "resume_step": plan.resume_step, "strategy": plan.strategy, "nodes": nodes,
                "left_out": list(plan.left_out), "notes": [note.with_options(options) for note in resumed.notes], "warnings": list(plan.warnings),
                "diagnosis": diagnosis.with_options(options).model_dump(mode="json") if diagnosis else None,
            })  # fmt: skip
            return
        if resumed.is_program:
            self.line(f"{name}: {events.resumed(plan.attempt, plan.resume_step, is_program=True).sentence}, on {', '.join(nodes)}")
        else:
            begins = f"after step {plan.resume_step}" if plan.resume_step else "at step 0"
            self.console.print(f"attempt {plan.attempt} of {name} continues {begins} on {', '.join(nodes)}")
        if resumed.strategy:
            self.line(f"  {resumed.strategy}")
        for warning in plan.warnings:
            self.console.print(f"  {warning}", markup=False, highlight=False)
        self.line(f"  follow   homelab status {name}{self.options}")
