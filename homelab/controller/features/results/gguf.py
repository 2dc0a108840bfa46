"""The sequence of `homelab gguf`: the merged model becomes one GGUF file on the node that holds it, and comes here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.base.units import listed
from homelab.controller.features.results import best_copy, fetch, llama_cpp, make, merge, receive
from homelab.controller.features.results.best_copy import ModelHolder
from homelab.controller.features.results.fetch import Fetched
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths
from homelab.shared.law import usable
from homelab.shared.protocol import result_files
from homelab.shared.protocol.request import RunRequest

_BY_LIBRARY = "q4_k_m"  # llama.cpp's converter writes the other kinds without its library


@dataclass(frozen=True)
class GgufRequest:
    """`kind` of the quantisation; `checkout`: a folder with llama.cpp's sources, whose converter is taken; None: the one that was tested."""

    kind: str
    checkout: Path | None


def gguf(fleet: Fleet, paths: RunPaths, wanted: GgufRequest, place: Path, say: Say) -> Fetched:
    """Merge where no node has the newest adapter merged, convert there, and bring the file to `place`. Raises HomelabError, InputError."""
    run_folder.refuse_scores(paths)
    receive.checked_place(place)
    if wanted.checkout is None:
        _refuse_unknown(paths)
    say("searching for the node that has the model")
    source = _whole_model(fleet, paths, say)
    agent = fleet.agent(source.node)
    machine = agent.ask("result-look", RunRequest(run=paths.name))["machine"] if wanted.kind == _BY_LIBRARY else None
    say("fetching llama.cpp's converter, where it is not here yet")
    digest, archive = llama_cpp.archive(machine, wanted.checkout, homelab("gguf", paths.name))
    folder = f"{agent.node.workdir}/llama.cpp/{digest}"
    agent.unpack(folder, archive, timeout_s=600.0)
    request = {
        "run": paths.name,
        "folder": source.folder,
        "kind": wanted.kind,
        "llama_cpp": folder,
        "own_converter": wanted.checkout is not None,
    }
    made = make.run_node_program(agent, "gguf", request, say)
    done = fetch.bring(fleet, paths, ModelHolder(node=source.node, folder=made.folder), place, say)
    file = result_files.gguf_file(paths.name, wanted.kind)
    if not (place / file).is_file():
        kept = f" (it kept {listed(done.left_out)})" if done.left_out else ""
        raise HomelabError(
            f"the node has not sent {file}{kept}", where=f"node {source.node}, {made.folder}/ of {paths.name}",
            hint=homelab("gguf --quantise", wanted.kind, paths.name),
        )  # fmt: skip
    return done


def _refuse_unknown(paths: RunPaths) -> None:
    """Raises InputError before anything is merged where the tested converter does not know the run's model."""
    model = run_folder.description_of(paths).run_json.get("model")
    config = model.get("config") if isinstance(model, dict) else None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return
    refusal = usable.gguf_refusal(names[0][:80])
    if refusal is not None:
        raise InputError(refusal.reason, where=f"{paths.name}: architectures in the model's config.json", hint=Hint("{}", refusal.edit))


def _whole_model(fleet: Fleet, paths: RunPaths, say: Say) -> ModelHolder:
    """The newest merged model, made where it is not there yet; of a full fine-tuning the model itself."""
    results, errors = fetch.results_of(fleet, paths)
    newest = best_copy.choose(paths.name, results, errors)
    method = run_folder.description_of(paths).recipe.method
    if method is not None and method.kind == "full":
        return fetch.exported(fleet, paths, newest, say)
    names = best_copy.merged(results, newest.folder)
    node = names[0] if names else merge.merge(fleet, paths, "auto", say).node
    return ModelHolder(node=node, folder=result_files.MERGED, step=newest.step)
