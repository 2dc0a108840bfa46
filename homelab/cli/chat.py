"""`homelab chat`: one answer of the fine-tuned model, computed on the head node."""

from __future__ import annotations

from typing import Annotated

import typer

from homelab.cli import common
from homelab.text.sanitize import plain


def command(
    run: common.RunArgument = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The question.", show_default=False)] = ...,  # type: ignore[assignment]
    base: Annotated[bool, typer.Option("--base", help="Ask the model as it was before training.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, max=4096)] = 128,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Ask the model a run has made (or its newest checkpoint) one question."""
    from homelab.control.inspection import chat, run_lookup
    from homelab.remote.fanout import Fleet

    loaded = common.load_cluster(cluster)
    with Fleet(loaded) as fleet, common.progress(as_json) as say:
        paths = run_lookup.run(fleet, runs_dir, run, say)
        say("the model is being loaded on the head")
        answer = chat.ask(fleet, paths, prompt, base=base, max_new_tokens=max_new_tokens)
    if as_json:
        common.print_json({"run": paths.name, "base": base, "prompt": prompt, **answer.as_dict()})
    else:
        for note in answer.notes:  # the answer alone goes to stdout
            typer.echo(f"note: {plain(note)}", err=True)
        typer.echo(answer.text)
    return 0
