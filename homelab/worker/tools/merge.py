"""python -m homelab.worker.tools.merge: the adapter put into its base model, on the CPU, with the losses of what comes out.

Reads one JSON object from standard input, {"run_dir", "folder": of the adapter, "base": "original", "dequantised" or "auto"}, prints lines
of progress, and at the end {"made": {"folder", "notes", "figures"}}. Weights are added in fp32 and rounded once, to the dtype of the
base model's files. PEFT's own merge into NF4 rounds to 4 bits again (peft issue 2321); this one never does.

Nothing is kept unseen: the logits of a few tokens are those of the adapter on the same base before the weights are rounded, and the files
that were written give the logits of the rounded weights (`homelab.worker.tools.merge_proof`).
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

from homelab.shared.law import usable
from homelab.shared.protocol import result_files
from homelab.shared.recipe import Method
from homelab.worker.errors import WorkerError
from homelab.worker.runtime import imports
from homelab.worker.runtime.recipe import section
from homelab.worker.tools import chat, merge_card, merge_proof, merge_room, run_model

BASES = ("original", "dequantised", "auto")


class Merge:
    """One merge, in its order: look at the room, measure the adapter, merge and measure, write."""

    def __init__(self, run_dir: Path, adapter: Path, base: str) -> None:
        self.run_dir, self.adapter, self.base = run_dir, adapter, base
        self.run = run_model.read_run(run_dir)
        self.method = section(Method, self.run["recipe"])
        self._check()
        imports.prepare(self.run, bitsandbytes=self.method.quantisation is not None)
        from homelab.worker.model.pretrained import model_path

        imports.quiet()
        self.path = model_path(self.run)
        self.figures: dict[str, float] = {}
        self.rows: list[Any] = []
        self.rows_name = ""
        self.pad = 0
        self.model: Any = None
        self.changes: tuple[Any, ...] = ()
        self.wanted: dict[str, Any] = {}  # kind of base -> logits of the adapter on it
        self.is_quantised = self.is_stored_quantised = self.is_untied = False

    def _check(self) -> None:
        if self.method.kind == "full":
            raise WorkerError(
                "all weights were trained: the result is a whole model, so there is nothing to merge",
                where="[method] kind",
                hint="homelab fetch",
            )
        if self.base not in BASES:
            raise WorkerError(f"{self.base!r} is not a base", where="--base", hint=f"--base {'|'.join(BASES)}")
        if self.base == "dequantised" and self.method.quantisation is None:
            raise WorkerError(
                f"the base of {self.method.kind} is not quantised", where="--base dequantised", hint="--base original, or leave it out"
            )
        if not (self.adapter / "adapter_config.json").is_file():
            raise WorkerError("there is no adapter", where=str(self.adapter), hint="`homelab status` shows the results of the run")

    def go(self) -> dict[str, Any]:
        """{"folder", "notes", "figures"}. Raises WorkerError; then nothing is kept, and an older merge stays."""
        import torch

        from homelab.worker.data.encoding import load_data
        from homelab.worker.model.pretrained import load_tokenizer
        from homelab.worker.tools import adapter_delta

        tokenizer = load_tokenizer(self.run, self.path)
        run_model.say("reading the rows")
        self.rows, self.rows_name = merge_proof.choose_rows(load_data(self.run, tokenizer))
        self.pad = tokenizer.pad_token_id or 0
        room, self.stored = self._room()
        self.dtype = torch.float32 if room.in_fp32 else self.stored
        run_model.say("loading the adapter on the base it was trained on")
        reference = chat.load(self.run, self.run_dir, self.path, self.adapter, None, dtype=self.dtype)
        self._measure(merge_card.ADAPTER, reference)
        self.changes = adapter_delta.changes(reference)
        self.is_quantised = any(change.held is not None for change in self.changes)
        self.wanted = {"dequantised" if self.is_quantised else "original": merge_proof.logits(reference, self.rows[0].tokens)}
        del reference
        kinds = self._kinds()
        for kind in kinds:
            self._merge_onto(kind)
            self._measure(merge_card.name_of(kind), self.model)
        chosen = merge_card.nearer(self.figures, kinds)
        # that one has another base than the adapter was trained on: the card shows the difference
        if not (chosen == "original" and self.is_quantised):
            merge_proof.refuse_other_loss(
                self.figures[merge_card.name_of(chosen)], self.figures[merge_card.ADAPTER], where=str(self.adapter)
            )
        if chosen != kinds[-1]:
            self._merge_onto(chosen)
        self._write(tokenizer, chosen)
        notes = [
            f"kept: {merge_card.name_of(chosen)}",
            f"measured on {self.rows_name}, in {str(self.dtype).removeprefix('torch.')} on the CPU",
        ]
        if self.is_untied:
            notes.append(
                "head and embeddings are two tensors in the merged model (tie_word_embeddings = false): an adapter changed only one of them"
            )
        return {"folder": result_files.MERGED, "notes": notes, "figures": self.figures}

    def _kinds(self) -> list[str]:
        """The bases to merge onto, in the order in which they are measured. Raises WorkerError where the model's files have no such weights."""
        if self.is_stored_quantised:
            if self.base == "original":
                raise WorkerError(
                    "the files of this base are quantised: there are no original weights here",
                    where="--base original",
                    hint="--base dequantised, or leave it out",
                )
            return ["dequantised"]
        return [self.base] if self.base != "auto" else ["original"] + (["dequantised"] if self.is_quantised else [])

    def _measure(self, name: str, model: Any) -> None:
        done = _every(len(self.rows), f"loss of the {name}")
        self.figures[name] = merge_proof.rows_loss(model, self.rows, self.pad, done)
        run_model.say(f"loss of the {name}: {self.figures[name]:.4f}")

    def _room(self) -> tuple[merge_room.Room, Any]:
        """The bytes that are needed, said before anything is loaded; and the dtype of the base's files."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from homelab.worker.checkpoints.async_save import available_bytes
        from homelab.worker.model.pretrained import from_pretrained

        config = from_pretrained(AutoConfig, self.path, revision=self.run["recipe"]["model"].get("revision"))
        self.is_stored_quantised = usable.checkpoint_of(config.to_dict())[0] in (usable.BNB_4BIT, usable.BNB_8BIT)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        weights = sum(weight.numel() for weight in empty.parameters())
        if self._unties(empty):
            self.is_untied = True
            weights += empty.get_output_embeddings().weight.numel()
        stored = getattr(config, "dtype", None) or torch.float32
        longest = max(len(row.tokens) for row in self.rows)
        sizes = merge_room.Sizes(weights, stored.itemsize, longest * config.get_text_config().vocab_size)
        free_memory, free_disk = available_bytes(), shutil.disk_usage(self.run_dir).free
        room = merge_room.choose(
            sizes, quantisation=self.method.quantisation, free_memory=free_memory, free_disk=free_disk, where=str(self.run_dir)
        )
        run_model.say(
            f"needs {room.memory_bytes / 1e9:.2f} GB of memory ({(free_memory or 0) / 1e9:.2f} GB free) and "
            f"{room.disk_bytes / 1e9:.2f} GB of disk ({free_disk / 1e9:.2f} GB free)"
        )
        return room, stored

    def _unties(self, empty: Any) -> bool:
        """Whether the adapter is on a head that is also the embeddings. `empty`: the base without weights."""
        from peft import PeftConfig

        from homelab.worker.model import adapted, adapter_targets, experts_adapter

        with adapter_targets.as_written():
            return adapted.unties(experts_adapter.put_on(empty, PeftConfig.from_pretrained(str(self.adapter))))

    def _merge_onto(self, kind: str) -> None:
        """`self.model`: the base with the adapter in it, rounded to what its files hold. Raises WorkerError where it computes something else."""
        from homelab.worker.model.build import load_base
        from homelab.worker.tools import adapter_delta

        self.model = None  # the one before goes first
        gc.collect()
        run_model.say(f"merging onto the {kind} base")
        model = load_base(self.path, self.run["recipe"]["model"].get("revision"), None, self.dtype, None, "this node")
        if self.is_stored_quantised:
            model = _dequantised(model, self.dtype)
        if kind not in self.wanted:
            model = self._with_adapter(model, kind)
        done = _every(len(self.changes), f"merging onto the {kind} base, weight")
        for count in adapter_delta.put_into(model, self.changes, dequantised=kind == "dequantised"):
            done(count)
        merge_proof.refuse_another(
            merge_proof.logits(model, self.rows[0].tokens), self.wanted[kind], self.dtype, what="the merged model", where=str(self.adapter)
        )
        adapter_delta.rounded(model, self.stored)
        self.model = model

    def _with_adapter(self, model: Any, kind: str) -> Any:
        """The same model, after the logits of the adapter on it were taken down."""
        from homelab.worker.checkpoints.weights import load_adapter

        adapted = load_adapter(model, self.adapter)
        self.wanted[kind] = merge_proof.logits(adapted, self.rows[0].tokens)
        return adapted.unload()

    def _write(self, tokenizer: Any, chosen: str) -> None:
        from homelab.worker.checkpoints import saving
        from homelab.worker.model.build import load_base
        from homelab.worker.tools import adapter_delta

        run_model.say("writing the merged model")
        card = (self.adapter / result_files.CARD).read_text(encoding="utf-8")
        tokens = self.rows[0].tokens
        with run_model.replaced(self.run_dir / result_files.MERGED) as partial:
            wanted = merge_proof.logits(self.model, tokens)
            saving.save_whole(adapter_delta.narrowed(self.model, self.stored), partial)
            self.model = None
            gc.collect()
            run_model.say("reading what was written")
            seen = merge_proof.logits(load_base(str(partial), None, None, self.dtype, None, "this node"), tokens)
            merge_proof.refuse_another(
                seen, wanted, self.dtype, what="the model in the written files", where=str(self.run_dir / result_files.MERGED)
            )
            tokenizer.save_pretrained(partial)
            record = {"folder": self.adapter.relative_to(self.run_dir).as_posix(), "base": self.base}
            (partial / result_files.MERGED_FROM).write_text(json.dumps(record), encoding="utf-8")
            (partial / result_files.CARD).write_text(merge_card.text(card, self.figures, chosen, self.rows_name), encoding="utf-8")


def _dequantised(model: Any, dtype: Any) -> Any:
    """A model of quantised files with plain weights. transformers would write it by undoing how it was read, and nothing undoes a quantisation."""
    plain = model.dequantize(dtype)
    plain._weight_conversions = [
        entry
        for entry in getattr(plain, "_weight_conversions", None) or []
        if not any("bitsandbytes" in type(step).__module__ for step in getattr(entry, "operations", ()))
    ]
    return plain


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
