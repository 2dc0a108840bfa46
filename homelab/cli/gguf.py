"""`homelab gguf`: the trained model as one file for Ollama and llama.cpp."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from homelab.cli import common, completion, terminal
from homelab.shared.protocol.result_files import QUANTISATIONS, ascii_name, gguf_file


def _kind(text: str) -> str:
    if text.lower() not in QUANTISATIONS:
        raise typer.BadParameter(f"{text!r}; allowed: {', '.join(QUANTISATIONS)}")
    return text.lower()


def command(
    run: common.RunArgument = None,
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="The folder to write. Default: models/RUN-KIND.", show_default=False)
    ] = None,
    quantise: Annotated[
        str,
        typer.Option(
            "--quantise",
            metavar="|".join(QUANTISATIONS),
            parser=_kind,
            help="q4_k_m: smallest; q8_0: nearly without loss; bf16, f16: as trained.",
            autocompletion=completion.quantisations,
        ),
    ] = "q4_k_m",
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            "--llama-cpp",
            metavar="DIR",
            help="Use the converter of this checkout of llama.cpp (it may know newer models).",
            show_default=False,
        ),
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Make a GGUF file of the trained model, with a Modelfile for Ollama. An adapter is merged first. The converter of llama.cpp runs on the node."""
    from homelab.controller.base.units import decimal_size
    from homelab.controller.features.results import gguf

    with common.fleet_of_run(run, cluster, runs_dir, as_json) as (fleet, paths, say):
        place = folder or Path("models") / f"{paths.name}-{quantise}"
        done = gguf.gguf(fleet, paths, gguf.GgufRequest(quantise, llama_cpp), place, say)
    if as_json:
        common.print_json(done.model_dump())
        return 0
    file = shlex.quote(str(place / gguf_file(paths.name, quantise)))
    terminal.echo(f"{'made' if done.changed else 'nothing was changed:'} {file}, {decimal_size(done.total_bytes)}, made on {done.node}")
    name = shlex.quote(ascii_name(paths.name).lower())
    terminal.echo(f"Ollama:     ollama create {name} -f {shlex.quote(str(place / 'Modelfile'))} && ollama run {name}")
    terminal.echo(f"llama.cpp:  llama-cli -m {file}")
    same = common.same_options(cluster, runs_dir)
    terminal.echo(
        f"vLLM:       homelab fetch --merged {shlex.quote(paths.name)}{same} && vllm serve {shlex.quote(f'models/{paths.name}-merged')}"
    )
    terminal.echo(f"Next: ollama create {name} -f {shlex.quote(str(place / 'Modelfile'))}")
    return 0
