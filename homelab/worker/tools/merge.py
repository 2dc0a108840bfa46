"""python -m homelab.worker.tools.merge: the adapter put into its base model, on the CPU, with the losses of what comes out.

Reads one JSON object from standard input, {"run_dir", "folder": of the adapter, "base": "original", "dequantised" or "auto"}, prints lines
of progress, and at the end {"made": {"folder", "notes", "figures"}}. Weights are added in fp32 and rounded once, to the dtype of the
base model's files. PEFT's own merge into NF4 rounds to 4 bits again (peft issue 2321); this one never does.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from homelab.protocol import result_files
from homelab.worker.errors import WorkerError
from homelab.worker.runtime import imports
from homelab.worker.runtime.recipe import Method, section
from homelab.worker.tools import chat, merge_card, merge_room, run_model

BASES = ("original", "dequantised", "auto")


class Merge:
    """One merge, in its order: look at the room, measure the adapter, merge and measure, write."""

    def __init__(self, run_dir: Path, adapter: Path, base: str) -> None:
        self.run_dir, self.adapter, self.base = run_dir, adapter, base
        self.run = run_model.read_run(run_dir)
        self.method = section(Method, self.run["recipe"])
        self._check()
        imports.prepare(self.run, bitsandbytes=self.method.quantisation is not None)
        from homelab.worker.model.build import model_path

        imports.quiet()
        self.path = model_path(self.run)
        self.figures: dict[str, float] = {}
        self.rows: list[Any] = []
        self.rows_name = ""

    def _check(self) -> None:
        if self.method.kind == "full":
            raise WorkerError("all weights were trained: the result is a whole model, and there is nothing to merge", where="[method] kind", hint="homelab fetch")
        if self.base not in BASES:
            raise WorkerError(f"{self.base!r} is no base", where="--base", hint=f"--base {'|'.join(BASES)}")
        if self.base == "dequantised" and self.method.quantisation is None:
            raise WorkerError(f"the base of {self.method.kind} is not quantised", where="--base dequantised", hint="--base original, or leave it out")
        if not (self.adapter / "adapter_config.json").is_file():
            raise WorkerError("there is no adapter", where=str(self.adapter), hint="`homelab status` shows what the run has made")

    def go(self) -> dict[str, Any]:
        """{"folder", "notes", "figures"}. Raises WorkerError."""
        import torch

        from homelab.worker.data.encoding import load_data
        from homelab.worker.model.build import load_tokenizer
        from homelab.worker.tools import adapter_delta, held_out_rows

        tokenizer = load_tokenizer(self.run, self.path)
        run_model.say("reading the rows")
        self.rows, self.rows_name = held_out_rows.choose(load_data(self.run, tokenizer))
        room, stored = self._room()
        self.dtype = torch.float32 if room.in_fp32 else stored
        pad = tokenizer.pad_token_id or 0

        def measured(name: str, model: Any) -> None:
            done = _every(len(self.rows), f"loss of the {name}")
            self.figures[name] = held_out_rows.loss(model, self.rows, pad, done)
            run_model.say(f"loss of the {name}: {self.figures[name]:.4f}")

        run_model.say("loading the adapter on the base it was trained on")
        reference = chat.load(self.run, self.run_dir, self.path, self.adapter, None, dtype=self.dtype)
        measured(merge_card.ADAPTER, reference)
        layers = adapter_delta.layers(reference)
        del reference
        gc.collect()
        kinds = [self.base] if self.base != "auto" else ["original"] + (["dequantised"] if self.method.quantisation else [])
        model = None
        for kind in kinds:
            model = None  # the one before goes first
            gc.collect()
            model = self._merged(layers, kind, stored)
            measured(merge_card.name_of(kind), model)
        chosen = merge_card.nearer(self.figures, kinds)
        if chosen != kinds[-1]:
            model = None
            gc.collect()
            model = self._merged(layers, chosen, stored)
        self._write(model, tokenizer, chosen, stored)
        notes = [f"kept: {merge_card.name_of(chosen)}", f"measured on {self.rows_name}, in {str(self.dtype).removeprefix('torch.')} on the CPU"]
        return {"folder": result_files.MERGED, "notes": notes, "figures": self.figures}

    def _room(self) -> tuple[merge_room.Room, Any]:
        """The bytes that are needed, said before anything is loaded; and the dtype of the base's files."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from homelab.worker.checkpoints.async_save import available_bytes
        from homelab.worker.model.build import from_pretrained

        config = from_pretrained(AutoConfig, self.path, revision=self.run["recipe"]["model"].get("revision"))
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        stored = getattr(config, "dtype", None) or torch.float32
        longest = max(len(row.tokens) for row in self.rows)
        sizes = merge_room.Sizes(sum(weight.numel() for weight in empty.parameters()), stored.itemsize, longest * config.get_text_config().vocab_size)
        free_memory, free_disk = available_bytes(), shutil.disk_usage(self.run_dir).free
        room = merge_room.choose(sizes, quantisation=self.method.quantisation, free_memory=free_memory, free_disk=free_disk, where=str(self.run_dir))
        run_model.say(
            f"needs {room.memory_bytes / 1e9:.2f} GB of memory ({(free_memory or 0) / 1e9:.2f} GB free) and "
            f"{room.disk_bytes / 1e9:.2f} GB of disk ({free_disk / 1e9:.2f} GB free)"
        )
        return room, stored

    def _merged(self, layers: Any, kind: str, stored: Any) -> Any:
        from homelab.worker.model.build import load_base
        from homelab.worker.tools import adapter_delta

        run_model.say(f"merging onto the {kind} base")
        model = load_base(self.path, self.run["recipe"]["model"].get("revision"), None, self.dtype, None, "this node")
        done = _every(len(layers), f"merging onto the {kind} base, layer")
        for count in adapter_delta.put_into(model, layers, dequantised=kind == "dequantised", stored=stored):
            done(count)
        return model

    def _write(self, model: Any, tokenizer: Any, chosen: str, stored: Any) -> None:
        run_model.say("writing the merged model")
        card = (self.adapter / result_files.CARD).read_text(encoding="utf-8")
        with run_model.replaced(self.run_dir / result_files.MERGED) as partial:
            model.to(stored).save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            record = {"folder": self.adapter.relative_to(self.run_dir).as_posix(), "base": self.base}
            (partial / result_files.MERGED_FROM).write_text(json.dumps(record), encoding="utf-8")
            (partial / result_files.CARD).write_text(merge_card.text(card, self.figures, chosen, self.rows_name), encoding="utf-8")


def _every(total: int, text: str) -> Callable[[int], None]:
    """Says every tenth of the work."""
    step = max(1, total // 10)

    def done(count: int) -> None:
        if count % step == 0 or count == total:
            run_model.say(f"{text}: {count} of {total}")

    return done


def main() -> int:
    """Read the question, merge, print what was made. Returns 0, or an error's code with its three parts on standard error."""
    question = json.load(sys.stdin)
    os.nice(10)
    run_dir = Path(question["run_dir"]).expanduser()
    return run_model.answered(lambda: Merge(run_dir, run_dir / result_files.folder(question["folder"]), question["base"]).go())


if __name__ == "__main__":
    sys.exit(main())
