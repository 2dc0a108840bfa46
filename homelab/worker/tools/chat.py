"""python -m homelab.worker.tools.chat: ask the trained model one thing, on the node where it is.

Reads one JSON object from standard input, {"run_dir", "prompt", "base": bool, "max_new_tokens"}, and prints {"answer"} as JSON,
with {"notes"} on how it was computed where there are any. `base` asks the model as it was before training. Uses final/, or
the newest complete checkpoint while there is no final/.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homelab.shared.protocol import layout
from homelab.shared.protocol.quantisation import NF4
from homelab.shared.recipe import Method, Model
from homelab.worker.checkpoints import checkpoint_folder, held
from homelab.worker.errors import WorkerError
from homelab.worker.runtime import imports
from homelab.worker.runtime.recipe import section
from homelab.worker.tools import footprint
from homelab.worker.tools.footprint import RoomOnCard


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The model's greedy answer, and notes on how it was computed.

    Raises WorkerError when there is nothing trained yet or nothing readable, NoRoom when there is no memory for the model.
    """
    run_dir = Path(question["run_dir"]).expanduser()
    try:
        run = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkerError(f"this is not a run: {error}", where=str(run_dir / "run.json"), hint="`homelab status` lists runs") from error
    with trained_folder(run, run_dir, is_base=question.get("base", False)) as trained:
        return _answer(question, run, run_dir, trained)


def _answer(question: dict[str, Any], run: dict[str, Any], run_dir: Path, trained: Path | None) -> dict[str, Any]:
    imports.prepare(run, bitsandbytes=section(Method, run["recipe"]).quantisation is not None)

    import torch

    from homelab.worker.model.pretrained import load_tokenizer, model_path

    imports.quiet()
    path = model_path(run)
    tokenizer = load_tokenizer(run, path)
    tokens = encode(run, tokenizer, [{"role": "user", "content": question["prompt"]}])
    longest = tokens["input_ids"].shape[1] + int(question.get("max_new_tokens", 128))
    where = place(run, run_dir, path, trained, longest)
    try:
        model = load(run, run_dir, path, trained, where.card).eval()
        with torch.no_grad():
            output = generate(model, tokens.to(next(model.parameters()).device), tokenizer, int(question.get("max_new_tokens", 128)))
    except torch.OutOfMemoryError as error:
        raise no_memory(error, path) from error
    text = tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    return {"answer": text} | ({"notes": [where.note]} if where.note else {})


def generate(model: Any, tokens: Any, tokenizer: Any, max_new_tokens: int, **options: Any) -> Any:
    """The greedy answer's tokens behind those of the question, [1, length]. `options`: of transformers' generate."""
    return model.generate(
        input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], max_new_tokens=max_new_tokens, do_sample=False, temperature=None, top_p=None,
        top_k=None, pad_token_id=tokenizer.pad_token_id, **options,
    )  # fmt: skip


def no_memory(error: BaseException, where: str) -> footprint.NoRoom:
    """What is told when the card has no room for the answer."""
    first = str(error).strip().splitlines()[0]
    hint = "free the card (nvidia-smi shows the programs on it), or ask for fewer tokens (--max-new-tokens)"
    return footprint.NoRoom(f"the card has not enough memory for the answer: {first}", where=where, hint=hint)


def encode(run: dict[str, Any], tokenizer: Any, messages: list[dict[str, str]]) -> Any:
    """A conversation as the run was trained on questions: in the chat template where the model has one, unless [data] template is "none" (the last message alone)."""
    if not tokenizer.chat_template or run["recipe"]["data"].get("template") == "none":
        return tokenizer(messages[-1]["content"], return_tensors="pt")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")


@contextlib.contextmanager
def trained_folder(run: dict[str, Any], run_dir: Path, *, is_base: bool = False) -> Iterator[Path | None]:
    """The folder with the newest trained model, which stays in the block although the run trains on; None for the base alone.

    Raises WorkerError when there is none, or when a checkpoint is damaged: before anything is loaded.
    """
    root = run_dir / layout.CHECKPOINTS
    if is_base or (run_dir / layout.FINAL).is_dir():
        yield None if is_base else run_dir / layout.FINAL
        return
    if not checkpoint_folder.complete_steps(root):
        hint = "wait for the first checkpoint (`homelab status`), or ask the base model"
        raise WorkerError("this run has no checkpoint yet on this node", where=str(root), hint=hint)
    with held.newest(root, run["recipe_hash"]) as folder:
        yield folder


def place(
    run: dict[str, Any], run_dir: Path, path: str, trained: Path | None, tokens: int, *, beside_base: bool = False
) -> footprint.Place:
    """The device for the model, by the free memory. Raises NoRoom when it fits nowhere.

    `beside_base`: the base answers, too. An adapter is left out for that; wholly trained weights have it beside them.
    """
    import torch

    from homelab.worker.checkpoints.async_save import available_bytes
    from homelab.worker.model import stored_weights
    from homelab.worker.model.pretrained import DTYPES

    method, revision = run["recipe"]["method"], run["recipe"]["model"].get("revision")
    source, revision = (str(trained), None) if _is_whole(method, trained) else (path, revision)
    dtype = None if method["kind"] == "full" else DTYPES[_precision(run_dir)]
    added = sum(file.stat().st_size for file in trained.glob("*.safetensors")) if trained and method["kind"] != "full" else 0
    needed = footprint.answer_bytes(
        source, revision, quantisation=stored_weights.wanted(section(Method, run["recipe"])), dtype=dtype, tokens=tokens, added_bytes=added
    )
    if beside_base and method["kind"] == "full" and trained is not None:
        base = footprint.answer_bytes(
            path, run["recipe"]["model"].get("revision"), quantisation=None, dtype=None, tokens=tokens, added_bytes=0
        )
        needed = None if needed is None or base is None else needed + base
    busy = _training_cards(run, run_dir)
    cards = [
        RoomOnCard(index, torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index)[0], index in busy)
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return footprint.choose(needed, cards, available_bytes(), run=str(run.get("name") or "RUN"), model=path)


def _is_whole(method: dict[str, Any], trained: Path | None) -> bool:
    """Whether the folder is a whole model: final/ of a full fine-tuning."""
    return trained is not None and trained.name == "final" and method["kind"] == "full"


def _newest_attempt(run_dir: Path) -> Path | None:
    attempts = [folder for folder in (run_dir / "attempts").glob("*") if folder.name.isdigit()]
    return max(attempts, key=lambda folder: int(folder.name), default=None)


def _precision(run_dir: Path) -> str:
    """The precision of the newest attempt on this node's kind of device; fp32 without its plan."""
    attempt = _newest_attempt(run_dir)
    try:
        return str(json.loads((attempt / "plan.json").read_text(encoding="utf-8"))["precision"]) if attempt else "fp32"
    except (OSError, ValueError, KeyError):
        return "fp32"


def _training_cards(run: dict[str, Any], run_dir: Path) -> set[int]:
    """Numbers of the cards on which this run's ranks compute at this moment, on this node."""
    attempt = _newest_attempt(run_dir)
    cards: set[int] = set()
    for beat in attempt.glob("ranks/*/heartbeat.json") if attempt else ():
        try:
            plan = json.loads((attempt / "plan.json").read_text(encoding="utf-8"))  # type: ignore[operator]
            if plan["device"] != "cuda":
                continue
            environment = Path(f"/proc/{int(json.loads(beat.read_text(encoding='utf-8'))['pid'])}/environ").read_bytes()
            if f"HOMELAB_RUN={run.get('name')}".encode() in environment.split(b"\0"):  # not another process under an old number
                cards |= {int(rank["local_rank"]) for rank in plan["ranks"] if str(rank["rank"]) == beat.parent.name}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return cards


def load(run: dict[str, Any], run_dir: Path, path: str, trained: Path | None, card: int | None, dtype: Any = None) -> Any:
    """The model at `path` as it was trained on, with what `trained_folder` found. `card` None: on the CPU. `dtype` None: that of the training, whose
    quantised base may lie on this node."""
    from homelab.worker.checkpoints.weights import load_adapter, load_weights
    from homelab.worker.model import quantised_cache, stored_weights, trained_weights
    from homelab.worker.model.build import add_adapters, load_base
    from homelab.worker.model.pretrained import DTYPES

    method = run["recipe"]["method"]
    if trained is not None and _is_whole(method, trained):
        return load_base(str(trained), None, None, "auto", card, "this node")
    how, of_training = stored_weights.wanted(section(Method, run["recipe"])), DTYPES[_precision(run_dir)]
    source = section(Model, run["recipe"])
    read = functools.partial(
        load_base, quantisation=how, dtype="auto" if method["kind"] == "full" else dtype or of_training, card=card, where="this node"
    )
    kept = quantised_cache.folder_of(run_dir, source, path, of_training) if how == NF4 and dtype is None else None
    model = quantised_cache.load(kept, path, read, lambda _: None)
    if model is None:
        model = read(path, source.revision)
    if trained is None:
        return model
    if (trained / "adapter_config.json").is_file():
        return load_adapter(model, trained)
    if method["kind"] != "full":
        model = add_adapters(model, section(Method, run["recipe"]), int(run["recipe"]["train"]["seed"]))
    trained_weights.freeze_unreached(model, lambda _: None)  # as in the training: a checkpoint has only what is trained
    load_weights(model, trained)
    return model


def main() -> int:
    """Read the question, print the answer. Returns 0, or the code of an error with its three parts on standard error."""
    try:
        print(json.dumps(answer(json.load(sys.stdin))))
    except WorkerError as error:
        print(error.text, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
