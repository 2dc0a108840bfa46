"""`homelab chat`: a conversation with the fine-tuned model, or one answer, computed on the head node or across the stages of a pipeline."""

from __future__ import annotations

from typing import Annotated

import typer

from homelab.cli import common, terminal


def command(
    run: common.RunArgument = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            help="Ask one question. Default: a conversation, on the terminal or with the lines of a pipe.",
            show_default=False,
        ),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Ask the model as it was before training.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Ask the model before its training and after it.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, max=4096)] = 128,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Talk with the trained model of a run (or its newest checkpoint), in the precision of its training."""
    from homelab.cli import conversation
    from homelab.controller.base.errors import InputError
    from homelab.controller.base.hint import homelab
    from homelab.controller.features.chat import chat
    from homelab.controller.features.chat.conversation import begin
    from homelab.controller.remote.fanout import Fleet
    from homelab.controller.run import run_lookup

    if base and compare:
        raise InputError("--compare asks the base model, too", where="--base and --compare", hint="leave one of them out")
    if as_json and prompt is None:
        raise InputError("a conversation is no JSON document", where="--json", hint=homelab("chat --json --prompt", "..."))
    models = ["base", "trained"] if compare else ["base"] if base else ["trained"]
    loaded = common.load_cluster(cluster)
    with Fleet(loaded) as fleet:
        with common.progress(as_json) as say:
            paths = run_lookup.run(fleet, runs_dir, run, say)
            if prompt is not None:
                say("the head loads the model")
                answers = {
                    model: chat.ask(fleet, paths, prompt, base=model == "base", max_new_tokens=max_new_tokens, say=say) for model in models
                }
            else:
                held = begin(fleet, paths, models, say)
        if prompt is None:
            with held:
                conversation.hold(held, models, max_new_tokens)
            return 0
    if as_json:
        document = {
            model: {"run": paths.name, "base": model == "base", "prompt": prompt, **answer.as_dict()} for model, answer in answers.items()
        }
        common.print_json(document if compare else document[models[0]])
        return 0
    for model, answer in answers.items():
        for note in answer.notes:  # the answers alone go to stdout
            terminal.echo(f"note: {note}", err=True)
        terminal.echo((conversation.TITLES[model] if compare else "") + answer.text)
    return 0
