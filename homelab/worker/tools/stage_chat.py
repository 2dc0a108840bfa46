"""One question to a model that no node can hold: torchrun starts `python -m homelab.worker.tools.stage_chat` on the nodes of a pipeline's plan.

Every rank loads the layers of its stage (`homelab.worker.runtime.task` says which), with the part of what was trained that belongs to them. The
question is {"prompt", "base": bool, "max_new_tokens"} in `input.json` of the folder HOMELAB_COLLECTIVE_DIR. The last stage writes {"answer"} to its
results, and each its {"note"} where it has one (`homelab.worker.tools.rank_state`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homelab.shared.protocol import collective_stages, layout, manifest
from homelab.shared.protocol.quantisation import NF4
from homelab.worker.checkpoints import checkpoint_folder, held
from homelab.worker.errors import WorkerError
from homelab.worker.runtime import imports
from homelab.worker.runtime.task import Task, load_task
from homelab.worker.tools import chat, footprint
from homelab.worker.tools.rank_state import StateFile, leave, watched

if TYPE_CHECKING:
    from homelab.worker.strategies.pipeline.generation import Ring


def run(state: StateFile) -> None:
    """The part of one rank. Raises WorkerError where the stage cannot be loaded or nothing is trained, NoRoom where it does not fit."""
    state(collective_stages.IMPORTING)
    question = json.loads((state.folder / "input.json").read_text(encoding="utf-8"))
    task = load_task(os.environ)
    task = dataclasses.replace(task, plan={**task.plan, "backend": "gloo"})  # a token is small, and a stage may be on the CPU
    imports.prepare(task.run, bitsandbytes=task.method.quantisation is not None)

    import torch

    from homelab.worker.runtime import process_group
    from homelab.worker.strategies.pipeline import generation, trained_parts

    imports.quiet()
    state(collective_stages.JOINING)
    process_group.connect(task)
    source, folder = (None, None) if question.get("base") else _trained(task)
    state(collective_stages.LOADING)
    try:
        with _kept(task, source, folder) as trained:
            model, tokens, place = _load(task, question, is_final=bool(folder and folder.name == layout.FINAL))
            if source is not None:
                trained_parts.spread(model, trained, source)
        stage = task.stage
        assert stage is not None
        device = torch.device("cpu") if place.card is None else torch.device("cuda", place.card)
        ring = generation.Ring(stage, task.stage_ranks, int(model.config.get_text_config().hidden_size))
        results = [{"note": place.note}] if place.note else []
        state(collective_stages.ANSWERING, results=results)
        if stage.is_last:
            results.append({"answer": _answer(task, model.eval(), ring, tokens.to(device), int(question["max_new_tokens"]))})
        else:
            generation.serve(model.eval(), ring, device)
    except torch.OutOfMemoryError as error:
        raise chat.no_memory(error, f"node {task.node}") from error
    state(collective_stages.DONE, results=results)


def _answer(task: Task, model: Any, ring: Ring, tokens: Any, max_new_tokens: int) -> str:
    """The text of the answer, on the last stage."""
    import torch

    from homelab.worker.model.pretrained import load_tokenizer, model_path
    from homelab.worker.strategies.pipeline import generation

    tokenizer = load_tokenizer(task.run, model_path(task.run))
    generation.join(model, ring, tokens["input_ids"].device)
    with torch.no_grad():
        output = chat.generate(model, tokens, tokenizer, max_new_tokens, past_key_values=generation.StageCache(model.config))
    generation.end(ring)
    return str(tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def _trained(task: Task) -> tuple[int, Path]:
    """The rank that has the newest trained weights on its disk, and the folder there: final/ where there is one. The same on all ranks.

    Raises WorkerError when no rank has any.
    """
    from homelab.worker.runtime import process_group

    own = {"final": task.final_dir.is_dir(), "step": max(checkpoint_folder.complete_steps(task.checkpoints_dir), default=0)}
    everyone = [json.loads(text) for text in process_group.exchange("trained", json.dumps(own))]
    source = max(range(len(everyone)), key=lambda rank: (everyone[rank]["final"], everyone[rank]["step"], -rank))
    newest = everyone[source]
    if not newest["final"] and not newest["step"]:
        hint = "wait for the first checkpoint (`homelab status`), or ask the base model (--base)"
        raise WorkerError("this run has no checkpoint yet on any of its nodes", where=str(task.checkpoints_dir), hint=hint)
    return source, task.final_dir if newest["final"] else Path(manifest.folder_of(task.run_dir, newest["step"]))


@contextlib.contextmanager
def _kept(task: Task, source: int | None, folder: Path | None) -> Iterator[Path | None]:
    """What rank `source` reads, as it is now although the run trains on; None on all others. Raises WorkerError when it is damaged."""
    if source != task.rank or folder == task.final_dir:
        yield folder if source == task.rank else None
        return
    with held.newest(task.checkpoints_dir, task.recipe_hash) as kept:
        yield kept


def _load(task: Task, question: dict[str, Any], *, is_final: bool) -> tuple[Any, Any, footprint.Place]:
    """The model of this stage with adapters that are not trained yet, the tokens of the question, and where the model is.

    Whole trained weights are in final/ in the precision of the training. Raises WorkerError or NoRoom.
    """
    from homelab.worker.model import kept_layers, quantised_cache, stored_weights
    from homelab.worker.model.build import add_adapters, load_base
    from homelab.worker.model.kept_layers import KeptLayers
    from homelab.worker.model.pretrained import DTYPES, load_tokenizer, model_path
    from homelab.worker.strategies.pipeline import stage_reader

    assert task.stage is not None, "this needs a plan with stages"
    path, how = model_path(task.run), stored_weights.wanted(task.method)
    tokens = chat.encode(task.run, load_tokenizer(task.run, path), [{"role": "user", "content": question["prompt"]}])
    is_full = task.method.kind == "full"
    dtype = DTYPES[task.precision] if not is_full or is_final else footprint.stored_dtype(path, task.model.revision)
    longest = tokens["input_ids"].shape[1] + int(question["max_new_tokens"])
    place = _place(task, path, dtype, longest)
    reader: Callable[..., Any] = functools.partial(stage_reader.load, stage=task.stage)
    if task.streaming is not None and (place.card is not None or task.device == "cpu"):
        reader = stage_reader.reader(task, task.stage)
    folder = quantised_cache.folder_of(task.run_dir, task.model, path, dtype, kept_layers.PART) if how == NF4 else None
    if folder is not None:
        reader = functools.partial(reader, kept=KeptLayers(folder, lambda _: None, adds=False))
    model = load_base(path, task.model.revision, how, dtype, place.card, f"node {task.node}", reader)
    if not is_full:
        model = add_adapters(model, task.method, task.train.seed)
    return model, tokens, place


def _place(task: Task, path: str, dtype: Any, tokens: int) -> footprint.Place:
    """The rank's own card, or the CPU. Ranks of one node look at the same time, so each may have its part of the free RAM."""
    import torch

    from homelab.worker.checkpoints.async_save import available_bytes
    from homelab.worker.model import stored_weights

    stage, streaming = task.stage, task.streaming
    if stage is not None and streaming is not None:  # of the streamed layers, the device holds as many as there are places
        stage = dataclasses.replace(stage, end=stage.end - max(0, streaming.layers - streaming.places))
    reckoned = functools.partial(
        footprint.answer_bytes, path, task.model.revision, quantisation=stored_weights.wanted(task.method), dtype=dtype, tokens=tokens, added_bytes=0
    )  # fmt: skip
    needed = reckoned(stage=stage)
    cards = []
    if task.device == "cuda" and torch.cuda.is_available() and task.local_rank < torch.cuda.device_count():
        free_bytes = torch.cuda.mem_get_info(task.local_rank)[0]
        cards = [footprint.RoomOnCard(task.local_rank, torch.cuda.get_device_name(task.local_rank), free_bytes)]
    if streaming is not None and task.device == "cuda" and not any(needed is None or needed <= card.free_bytes for card in cards):
        needed = reckoned(stage=task.stage)  # nothing streams to a CPU beside a card: RAM would hold every layer
    ram_bytes = available_bytes()
    ram_bytes = None if ram_bytes is None else ram_bytes // task.nodes.count(task.node)
    return footprint.choose(needed, cards, ram_bytes, run=str(task.run.get("name") or "RUN"), model=f"{path}, {_named(task)}")


def _named(task: Task) -> str:
    assert task.stage is not None
    return f"layers {task.stage.begin} to {task.stage.end - 1} on node {task.node}"


if __name__ == "__main__":
    leave(watched(run))
