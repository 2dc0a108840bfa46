"""python -m homelab.worker.tools.gguf: a merged (or wholly trained) model as one GGUF file, with a Modelfile for Ollama.

Reads one JSON object from standard input, {"run_dir", "folder": of the model, "kind": of the quantisation, "llama_cpp": folder with
llama.cpp's converter and libraries, "own_converter": whether it is another than the tested one}, prints lines of progress, and at the end
{"made": {"folder", "notes"}}.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from homelab.shared.law import usable
from homelab.shared.protocol import result_files
from homelab.worker.errors import WorkerError
from homelab.worker.runtime import imports
from homelab.worker.tools import modelfile, run_model

_BY_LIBRARY = "q4_k_m"  # the converter writes the others itself
_BEAT_S = 2.0
_SPARE_BYTES = 100 * 10**6
_MOST_HEADER_BYTES = 256 << 20
# Bytes of a weight; of Q4_K_M by what small models reach, whose layers do not divide into its blocks.
_WEIGHT_BYTES = {"bf16": 2.0, "f16": 2.0, "q8_0": 1.07, "q4_k_m": 0.8}


def make(question: dict[str, Any]) -> dict[str, Any]:
    """{"folder", "notes"}. Raises WorkerError where the converter does not know the model, or the disk has no room."""
    run_dir, kind = Path(question["run_dir"]).expanduser(), str(question["kind"])
    source = run_dir / result_files.folder(question["folder"])
    place = run_dir / result_files.quantised(kind)
    run = run_model.read_run(run_dir)
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    if not weights:
        raise WorkerError("there is no complete model", where=str(source), hint="homelab merge")
    _refuse_unknown(source, is_tested=not question.get("own_converter", False))
    _check_room(weights, kind, run_dir)
    tools = Path(question["llama_cpp"]).expanduser()
    name = result_files.gguf_file(run_dir.name, kind)
    with run_model.replaced(place) as partial:
        first = partial / (f"{name}.bf16" if kind == _BY_LIBRARY else name)
        _convert(tools, source, first, "bf16" if kind == _BY_LIBRARY else kind, weights)
        _refuse_headless(first, source)
        if kind == _BY_LIBRARY:
            _quantise(tools, first, partial / name)
            first.unlink()
        (partial / result_files.MODELFILE).write_text(_modelfile(run, source, name), encoding="utf-8")
        (partial / result_files.CARD).write_text(_card(source, name), encoding="utf-8")
        size = (partial / name).stat().st_size
    return {"folder": result_files.quantised(kind), "notes": [f"{name}: {size / 1e6:.1f} MB, of {weights / 1e6:.1f} MB"]}


def _refuse_unknown(source: Path, *, is_tested: bool) -> None:
    """Raises WorkerError where the tested converter is known to make no right file of this model."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    name = next(iter(config.get("architectures") or ()), "")
    refusal = usable.gguf_refusal(str(name), is_untied=_has_head(source)) if is_tested and name else None
    if refusal is not None:
        raise WorkerError(refusal.reason, where=str(source), hint=refusal.edit)


def _has_head(source: Path) -> bool:
    """Whether the files have a head beside the embeddings. Only the names in their headers are read."""
    from safetensors import safe_open

    for path in source.glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            if any(name.endswith("lm_head.weight") for name in file.keys()):  # noqa: SIM118  # it is no dict
                return True
    return False


def _refuse_headless(made: Path, source: Path) -> None:
    """Raises WorkerError where the model's head is in its files and not in the GGUF file: some converters leave it out without a word.

    The names of the tensors are in the file before the first of them, each behind its length in 8 bytes (docs/gguf.md of ggml).
    """
    if not _has_head(source):
        return
    wanted, kept = b"\x0d\0\0\0\0\0\0\0output.weight", b""
    with open(made, "rb") as file:
        while block := file.read(1 << 20):
            if wanted in kept + block:
                return
            kept = block[-len(wanted) :]
            if file.tell() > _MOST_HEADER_BYTES:
                break
    raise WorkerError(
        "llama.cpp's converter left out the model's head: the file would be a different model", where=str(source),
        hint="serve it with vLLM (`homelab fetch --merged`), or give another converter: homelab gguf --llama-cpp DIR",
    )  # fmt: skip


def _check_room(weights: int, kind: str, run_dir: Path) -> None:
    """The model's weights have 2 bytes each, or 4."""
    needed = int(weights / 2 * (_WEIGHT_BYTES[kind] + (2.0 if kind == _BY_LIBRARY else 0.0))) + _SPARE_BYTES
    free = shutil.disk_usage(run_dir).free
    if needed > free:
        raise WorkerError(
            f"the GGUF file needs {needed / 1e9:.2f} GB of disk while it is made, and {free / 1e9:.2f} GB are free", where=str(run_dir),
            hint="make room on that disk (`df -h` shows it), then repeat the command",
        )  # fmt: skip


def _convert(tools: Path, source: Path, out: Path, kind: str, weights: int) -> None:
    run_model.say(f"converting to GGUF ({kind})")
    command = [sys.executable, str(tools / "convert_hf_to_gguf.py"), str(source), "--outfile", str(out), "--outtype", kind]
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # Published with layers that predict the tokens after the next one. transformers reads none of them, and the converter would count one.
    is_more = str(config.get("model_type")).startswith(("qwen3_5", "qwen3_next")) or any("mtp" in key or "nextn" in key for key in config)
    said = _watched([*command, "--no-mtp"] if is_more else command, out, weights, "converted")
    if is_more and said is not None and re.search("are not supported for|unrecognized arguments", said):
        said = _watched(command, out, weights, "converted")
    if said is None:
        return
    missing = re.search(r"No module named '([\w.]+)'", said)
    if missing:
        raise WorkerError(f"llama.cpp's converter needs the package {missing[1]}", where="this node's environment", hint="homelab setup")
    if "pre-tokenizer was not recognized" in said:
        raise WorkerError(
            "llama.cpp's converter does not know how this tokenizer splits text", where=str(source),
            hint="git clone https://github.com/ggml-org/llama.cpp; then homelab gguf --llama-cpp llama.cpp: a newer one may know it; or serve it with vLLM: homelab fetch --merged",
        )  # fmt: skip
    unknown = re.search(r"Model (\S+) is not supported", said)
    if unknown:
        raise WorkerError(
            f"llama.cpp's converter does not know {unknown[1]}", where=str(source),
            hint="git clone https://github.com/ggml-org/llama.cpp; then homelab gguf --llama-cpp llama.cpp: a newer one may know it; or serve it with vLLM: homelab fetch --merged",
        )  # fmt: skip
    _raise_failed("llama.cpp's converter", said, source)


def _quantise(tools: Path, source: Path, out: Path) -> None:
    run_model.say("quantising to 4 bits (Q4_K_M)")
    command = [sys.executable, "-m", "homelab.worker.tools.gguf_quantise", str(tools / "lib"), str(source), str(out)]
    said = _watched(command, out, int(source.stat().st_size * _WEIGHT_BYTES[_BY_LIBRARY] / 2), "quantised")
    if said is not None:
        _raise_failed("llama.cpp's quantiser", said, source)


def _raise_failed(program: str, said: str, where: Path) -> None:
    full = "No space left" in said or "Errno 28" in said
    last = ([line.strip() for line in said.splitlines() if line.strip()] or ["it said nothing"])[-1][:500]
    raise WorkerError(
        f"{program} failed: {'the disk is full' if full else last}", where=str(where),
        hint="make room on that disk (`df -h` shows it), then repeat the command" if full else "homelab gguf --quantise q8_0, or --llama-cpp DIR with another checkout",
    )  # fmt: skip


def _watched(command: list[str], out: Path, total: int, verb: str) -> str | None:
    """Run it, and say how large its file is; None where it ended well, else the end of what it said."""
    with open(out.with_name("said"), "w+b") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        while True:
            try:
                code = child.wait(_BEAT_S)
                break
            except subprocess.TimeoutExpired:
                size = out.stat().st_size if out.exists() else 0
                run_model.say(f"{verb} {size / 1e9:.2f} GB of about {total / 1e9:.2f} GB")
        output.seek(max(0, output.tell() - (16 << 10)))
        text = output.read().decode("utf-8", "replace")
    out.with_name("said").unlink()
    return None if code == 0 else text or f"exit code {code}"


def _modelfile(run: dict[str, Any], source: Path, name: str) -> str:
    imports.prepare(run, bitsandbytes=False)
    from transformers import AutoTokenizer

    from homelab.worker.data import template_clock

    imports.quiet()
    tokenizer = template_clock.bind(AutoTokenizer.from_pretrained(str(source)), template_clock.moment_of(run))
    is_chat = bool(tokenizer.chat_template) and run["recipe"]["data"].get("template") != "none"  # as `homelab chat` asks

    def render(messages: list[dict[str, str]]) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    adds_beginning = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]  # then llama.cpp does it, too
    form = modelfile.chat_form(render, tokenizer.bos_token if adds_beginning else "") if is_chat else None
    return modelfile.text(name, form, _ends(source, tokenizer), is_chat=is_chat)


def _ends(source: Path, tokenizer: Any) -> list[str]:
    """The tokens that end an answer: the tokenizer's own, and those of generation_config.json."""
    numbers = [tokenizer.eos_token_id]
    path = source / "generation_config.json"
    if path.is_file():
        more = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        numbers += more if isinstance(more, list) else [more]
    return list(dict.fromkeys(str(tokenizer.convert_ids_to_tokens(number)) for number in numbers if isinstance(number, int)))


def _card(source: Path, name: str) -> str:
    card = (source / result_files.CARD).read_text(encoding="utf-8").rstrip()
    return f"{card}\n\n## GGUF\n\n`{name}` was made of these weights by llama.cpp. `ollama create NAME -f Modelfile` makes an Ollama model from it.\n"


def main() -> int:
    """Read the question, convert, print what was made. Returns 0, or an error's code with its three parts on standard error."""
    question = json.load(sys.stdin)
    os.nice(10)
    return run_model.answered(lambda: make(question))


if __name__ == "__main__":
    sys.exit(main())
