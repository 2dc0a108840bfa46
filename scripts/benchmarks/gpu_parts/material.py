"""Random models of real shapes, rows of given lengths, and the run folders of the worker: everything is made here, nothing is downloaded."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from homelab.shared.law.pipeline_schedule import most_in_flight
from homelab.shared.recipe.data import Data
from homelab.shared.recipe.objective import Objective
from homelab.shared.recipe.training import Train


def llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """A config.json of this shape."""
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate, "vocab_size": vocabulary, "tie_word_embeddings": False, "max_position_embeddings": 4096, **more,
    }  # fmt: skip


_EXPERTS = llama(64, 2, 4, 2, 128, 300, model_type="qwen3_moe", head_dim=32)
SHAPES = {
    "tiny": llama(64, 2, 4, 2, 128, 300),
    "small": llama(512, 8, 8, 2, 1408, 32000),
    "1.1B": llama(2048, 22, 32, 4, 5632, 32000),  # TinyLlama
    "3B": llama(2048, 36, 16, 4, 11008, 128256, tie_word_embeddings=True),  # SmolLM3, without its layers that have no positions
    "7B": llama(4096, 32, 32, 32, 11008, 32000),  # Llama 2
    "experts": _EXPERTS | {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4},
    "tiny experts": _EXPERTS | {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
}


def model(folder: Path, shape: str, dtype: str = "bfloat16", device: str = "cpu") -> Path:
    """A model of this shape with a tokenizer of one token per byte. Made on the device: 7B on a CPU takes minutes."""
    if (folder / "tokenizer.json").is_file():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in SHAPES[shape].items() if key != "model_type"}
    config = AutoConfig.for_model(SHAPES[shape]["model_type"], bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings)
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    made.save_pretrained(folder)
    _tokenizer(folder)
    if device == "cuda":  # memory that this process holds is not free for the ranks
        del made
        gc.collect()
        torch.cuda.empty_cache()
    return folder


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<|pad|>", "<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=tokens[0], bos_token=tokens[1], eos_token=tokens[2], model_max_length=4096
    )
    made.save_pretrained(folder)


def lengths(count: int, most: int, *, seed: int = 0) -> list[int]:
    """Lengths of rows as instructions and answers have them: log-normal, median 140 tokens, cut at `most`."""
    draw = random.Random(seed)
    return [max(8, min(most, round(draw.lognormvariate(4.94, 0.8)))) for _ in range(count)]


def rows(file: Path, row_lengths: Sequence[int], *, seed: int = 0) -> Path:
    """Prompts and completions, together of these lengths in tokens; two thirds of a row carry loss."""
    draw = random.Random(seed)
    with file.open("w", encoding="utf-8") as stream:
        for length in row_lengths:
            text = "".join(draw.choice("abcdefghij klmnop qrstuv wxyz") for _ in range(length))
            stream.write(json.dumps({"prompt": text[: length // 3], "completion": text[length // 3 :]}) + "\n")
    return file


def run(folder: Path, of: Path, data: Path, **changes: Any) -> Path:
    """A run folder with run.json. `changes` are keys of the recipe, as section__key=value."""
    recipe: dict[str, Any] = {
        "model": {"name": str(of), "revision": None},
        "data": {
            "train": data.name, "eval": None, "eval_fraction": 0.0, "format": "auto", "completion_only": True, "packing": False,
            "split": "train", "text_column": "text",
        },
        "method": {"kind": "full", "rank": 16, "alpha": 32, "dropout": 0.0, "targets": "all-linear", "backend": "auto", "base": "auto", "model_dropout": False},
        "train": {
            "global_batch": 12, "epochs": 1, "steps": None, "learning_rate": 1e-3, "warmup_steps": 2, "schedule": "cosine", "seq_len": 256,
            "seed": 42, "weight_decay": 0.01, "max_grad_norm": 1.0, "optimizer": "adamw", "precision": "auto",
            "gradient_checkpointing": False, "fused_loss": False, "lr_scale": "none", "reference_batch": None,
        },
        "parallel": {"strategy": "auto", "shares": "auto", "micro_batch": "auto", "compress": "none", "port": 29500},
        "checkpoint": {"every_steps": 10**6, "keep": 2},
        "recovery": {"max_restarts": 0, "min_nodes": 1},
        "tracking": {"tensorboard": False, "eval_every_steps": 0},
        "script": None,
    }  # fmt: skip
    for kind in (Data, Train):  # a launch writes all keys
        given = {field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}
        recipe[kind.__name__.lower()] = {**given, **recipe[kind.__name__.lower()]}
    for name, value in changes.items():
        section, key = name.split("__")
        if section == "objective":  # left out where a recipe names nothing of it
            recipe.setdefault(section, {field.name: field.default for field in dataclasses.fields(Objective)})
        assert key in recipe[section], name
        recipe[section][key] = value
    if recipe["train"]["steps"] is not None:
        recipe["train"]["epochs"] = None
    source = {"path": str(data), "sha256": hashlib.sha256(data.read_bytes()).hexdigest(), "kind": "file"}
    digest = hashlib.sha256(json.dumps([recipe, source], sort_keys=True).encode()).hexdigest()[:16]
    folder.mkdir(parents=True)
    content = {
        "schema": 1,
        "name": folder.name,
        "moment": "2026-11-26T12:00:00+00:00",
        "rows": 2,
        "draws": 2,
        "experts_in_4_bits": True,
        "recipe": recipe,
        "recipe_hash": digest,
        "data": {"train": source, "eval": None},
        "versions": {},
    }
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def folder_of(run_folder: Path, rank: int) -> Path:
    """Each rank is a node of its own, with a disk of its own: the first one's is the run's folder."""
    return run_folder if rank == 0 else run_folder.with_name(f"{run_folder.name} on n{rank}")


def node_of(rank: int, per_node: int = 1) -> str:
    """The name of a rank's node."""
    return f"n{rank // per_node}"


def _stage(rank: int, stages: Sequence[int]) -> dict[str, Any] | None:
    if not stages:
        return None
    begin, own = sum(stages[:rank]), stages[rank]
    return {
        "number": rank, "begin": begin, "end": begin + own, "layers": sum(stages), "work": own / sum(stages), "in_flight": most_in_flight(rank, len(stages)),
    }  # fmt: skip


def alone(folder: Path, recipe: dict[str, Any], device: str, precision: str) -> Any:
    """The `Task` of one process that trains alone, for what loads a model as a worker does."""
    from homelab.worker.runtime.task import Task

    return Task(
        folder,
        1,
        "here",
        0,
        0,
        1,
        {"recipe": recipe},
        {"precision": precision, "device": device, "strategy": "ddp", "ranks": [{"rank": 0, "node": "here"}]},
    )


def remove(run_folder: Path, size: int) -> None:
    """The folders of all `size` ranks: checkpoints and final models are large."""
    for rank in range(size):
        shutil.rmtree(folder_of(run_folder, rank), ignore_errors=True)


def plan(
    run_folder: Path, attempt: int, shares: Sequence[int], *, device: str, precision: str, backend: str = "gloo", micro_batch: int = 2,
    measured: bool = False, resume_step: int = 0, switches: dict[str, bool] | None = None, strategy: str = "ddp", stages: Sequence[int] = (), per_node: int = 1,
    streaming: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """plan.json of an attempt with one rank for each share, `per_node` of them on a node, each with a folder of its own: all of them on the one card.

    `stages`: the layers of each stage of a pipeline, in the order of the ranks.
    """
    content = {
        "world_size": len(shares), "backend": backend, "device": device, "precision": precision, "attempt": attempt, "resume_step": resume_step,
        "strategy": strategy,
        "balance": "measured" if measured else "fixed", "nodes": list(dict.fromkeys(node_of(rank, per_node) for rank in range(len(shares)))), "switches": switches or {},
        "ranks": [
            {
                "rank": rank, "node": node_of(rank, per_node), "local_rank": 0, "device_name": device, "share": share, "micro_batch": micro_batch,
                "token_cap": None, "speed": None, "stage": _stage(rank, stages), "streaming": streaming,
            }
            for rank, share in enumerate(shares)
        ],
    }  # fmt: skip
    for rank in range(len(shares)):
        own = folder_of(run_folder, rank)
        (own / "attempts" / str(attempt)).mkdir(parents=True)
        (own / "attempts" / str(attempt) / "plan.json").write_text(json.dumps(content), encoding="utf-8")
        if own != run_folder:
            shutil.copy(run_folder / "run.json", own)
