"""The list of commands."""

from __future__ import annotations

import importlib

import typer

import homelab
from homelab.cli import bench, common, examples, lab, queue, terminal

app = typer.Typer(
    name="homelab", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Train language models on all your home machines together, with any NVIDIA GPUs or none.",
    epilog="A first look without GPU or cluster: homelab demo. Next: homelab init",
)  # fmt: skip


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Train language models on all your home machines together, with any NVIDIA GPUs or none."""
    if version:
        terminal.echo(f"homelab {homelab.__version__}")
        raise typer.Exit


# `supervise` is what launch leaves behind; by hand only after this machine was restarted in mid-run.
NAMES = (
    "init", "data", "new", "setup", "wake", "preflight", "doctor", "plan", "launch", "run", "status", "web", "logs", "stop", "recover", "yield", "why", "explain", "schema", "runs",
    "chat", "fetch", "merge", "gguf",
    "push", "tensorboard", "track", "profile", "report", "verify", "compare", "export", "trust", "teardown", "demo", "supervise",
)  # fmt: skip
for name in NAMES:
    command = importlib.import_module(f"homelab.cli.{name}").command
    app.command(name=name, hidden=name == "supervise", epilog=examples.epilog(name))(common.with_hints_for_same_files(command))
for name, command in (("suite", bench.command), ("card", bench.card)):
    bench.app.command(name=name, epilog=examples.epilog(f"bench {name}"))(common.with_hints_for_same_files(command))
queue.app.callback(invoke_without_command=True)(common.with_hints_for_same_files(queue.command))
for name in queue.COMMANDS:
    queue.app.command(name=name, epilog=examples.epilog(f"queue {name}"))(common.with_hints_for_same_files(getattr(queue, name)))
app.add_typer(queue.app, name="queue")
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")
