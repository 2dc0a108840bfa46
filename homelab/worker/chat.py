"""python -m homelab.worker.chat: ask the trained model one thing, on the node where it is.

Reads one JSON object from standard input, {"run_dir", "prompt", "base": bool, "max_new_tokens"}, and prints {"answer"} as JSON.
`base` asks the model as it was before training. Uses final/, or the newest complete checkpoint while there is no final/.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from homelab.worker import checkpoint, imports
from homelab.worker.errors import WorkerError


def answer(question: dict[str, Any]) -> str:
    """The model's greedy answer. Raises WorkerError when there is nothing trained yet, or nothing readable."""
    run_dir = Path(question["run_dir"]).expanduser()
    try:
        run = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"this is no run: {error}", where=str(run_dir / "run.json"), hint="`homelab status` lists runs"
        ) from error
    # Before anything is loaded: that nothing is trained yet is known at once.
    trained = None if question.get("base", False) else _trained(run, run_dir)
    imports.prepare(run, bitsandbytes=False)

    import torch

    from homelab.worker.model import load_tokenizer, model_path

    imports.quiet()
    path = model_path(run)
    tokenizer = load_tokenizer(run, path)
    model = _load(run, path, trained).eval()
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    else:
        tokens = tokenizer(question["prompt"], return_tensors="pt")
    tokens = tokens.to(next(model.parameters()).device)
    with torch.no_grad():
        output = model.generate(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            max_new_tokens=int(question.get("max_new_tokens", 128)),
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=tokenizer.pad_token_id,
        )
    return tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def _trained(run: dict[str, Any], run_dir: Path) -> Path:
    """The folder with the newest that was trained. Raises WorkerError when there is none, or when a checkpoint is damaged."""
    final = run_dir / "final"
    if final.is_dir():
        return final
    steps = checkpoint.complete_steps(run_dir / "checkpoints")
    if not steps:
        hint = "wait for the first checkpoint (`homelab status`), or ask the base model"
        raise WorkerError("this run has no checkpoint yet on this node", where=str(run_dir / "checkpoints"), hint=hint)
    folder = run_dir / "checkpoints" / checkpoint.folder_name(steps[-1])
    checkpoint.verify(folder, run["recipe_hash"])
    return folder


def _load(run: dict[str, Any], path: str, trained: Path | None) -> Any:
    """The model at `path`, with what `_trained` found."""
    import torch
    from transformers import AutoModelForCausalLM

    method = run["recipe"]["method"]
    cuda = torch.cuda.is_available()
    options = {"dtype": "auto", "trust_remote_code": False} | ({"device_map": {"": 0}} if cuda else {})
    is_final = trained is not None and trained.name == "final"
    if is_final and method["kind"] == "full":
        return AutoModelForCausalLM.from_pretrained(trained, **options)
    model = AutoModelForCausalLM.from_pretrained(path, revision=run["recipe"]["model"].get("revision"), **options)
    if trained is None:
        return model
    if is_final:
        from peft import PeftModel

        return PeftModel.from_pretrained(model, str(trained))
    from homelab.worker.model import add_adapters
    from homelab.worker.weights import load_weights

    if method["kind"] != "full":
        model = add_adapters(model, method, int(run["recipe"]["train"]["seed"]))
    load_weights(model, trained)
    return model


def main() -> int:
    """Read the question, print the answer. Returns 0, or 2 with one clear message on standard error."""
    try:
        print(json.dumps({"answer": answer(json.load(sys.stdin))}))
    except WorkerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
