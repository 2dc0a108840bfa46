"""How well a training step's peak memory is known before it runs.

dryrun_worst_error_percent    the dry run (real model class, no weights) against the same step of the real thing on this CPU, both followed
                              storage by storage; small Llama models, method x length x rows x checkpointing x fused loss
analytic_worst_error_percent  the formulas of `homelab plan` against the dry run, on the same grid and on Llama-2-7B and 13B, SmolLM3-3B and
                              TinyLlama-1.1B
cuda_*                        where torch sees a card: the prediction (dry run, context, allocator) against torch.cuda.max_memory_reserved and the
                              context; median and worst error in percent, and how often a card of exactly the predicted size would
                              have been too small by more than the 5 % that the plan adds for the allocator (false fits). nvidia-smi's figure for the process
                              and what `accelerate estimate-memory` says of the same model stand beside it.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu_parts import ranks, smi
from benchmarks.gpu_parts.material import SHAPES, alone, llama

from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.model.families import from_config
from homelab.shared.recipe import Method, Train

_SMALL = llama(128, 2, 4, 2, 384, 3000)
_LARGE = {
    "TinyLlama-1.1B": SHAPES["1.1B"],
    "SmolLM3-3B": SHAPES["3B"] | {"model_type": "smollm3", "pad_token_id": 0},
    "Llama-2-7B": SHAPES["7B"],
    "Llama-2-13B": llama(5120, 40, 40, 40, 13824, 32000),
}
_ON_CUDA = {"135M": llama(576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True), "1.1B": _LARGE["TinyLlama-1.1B"]}


def main() -> int:
    """Run the comparisons that this machine can. Returns 0."""
    options = report.arguments(__doc__ or "")
    import torch

    warnings.simplefilter("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    runs: list[dict[str, Any]] = []
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    try:
        small = _on_this_cpu(folder, runs)
        large = _large(runs)
        figures = {
            "dryrun_worst_error_percent": max(abs(run["dry_run_error_percent"]) for run in small),
            "analytic_worst_error_percent": max(abs(run["analytic_error_percent"]) for run in small + large),
        }
        rows = [
            ("dry run over real step, % (CPU)", report.spread([run["dry_run_error_percent"] for run in small])),
            ("formulas over dry run, small models, %", report.spread([run["analytic_error_percent"] for run in small])),
            ("formulas over dry run, 1.1B to 13B, %", report.spread([run["analytic_error_percent"] for run in large])),
            ("one dry run, 1.1B to 13B, s", report.spread([run["seconds"] for run in large])),
        ]
        if torch.cuda.is_available():
            figures |= _on_cuda(folder, runs, rows)
        else:
            rows.append(("CUDA", "no card here: not measured"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.finish("memory", figures, runs, rows, options.json)
    return 0


def _on_this_cpu(folder: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = []
    model = _save(folder / "small", _SMALL)
    for number, (kind, (seq_len, rows), checkpointing, fused) in enumerate(
        itertools.product(("full", "lora", "qlora"), ((96, 1), (192, 3)), (True, False), (True, False))
    ):
        run = situation("small", kind, "fp32" if number % 3 == 0 else "bf16", "cpu", seq_len, rows, checkpointing, fused)
        real = _real_step(model, run)
        dry = _dry(_SMALL, run)
        run |= {
            "real_bytes": real,
            "dry_run_bytes": dry["peak_bytes"],
            "dry_run_error_percent": 100 * (dry["peak_bytes"] / real - 1),
            "analytic_error_percent": 100 * (_analytic(_SMALL, run) / dry["peak_bytes"] - 1),
        }
        measured.append(run)
    runs += measured
    return measured


def _large(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = []
    for name, config in _LARGE.items():
        for seq_len, rows, fused in ((1024, 1, False), (2048, 2, True)):
            measured.append(_compared(name, config, situation(name, "qlora", "bf16", "cuda", seq_len, rows, True, fused)))
    tiny = "TinyLlama-1.1B"
    for kind, checkpointing, fused in (("lora", False, True), ("full", True, False)):
        measured.append(_compared(tiny, _LARGE[tiny], situation(tiny, kind, "bf16", "cuda", 1024, 2, checkpointing, fused)))
    runs += measured
    return measured


def _compared(name: str, config: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    dry = _dry(config, run)
    error = 100 * (_analytic(config, run) / dry["peak_bytes"] - 1)
    return run | {"dry_run_bytes": dry["peak_bytes"], "at": dry["at"], "seconds": dry["seconds"], "analytic_error_percent": error}


def situation(
    model: str, kind: str, precision: str, device: str, seq_len: int, rows: int, checkpointing: bool, fused: bool
) -> dict[str, Any]:
    """What a step is made of; `rows` of `seq_len` tokens each in a pass."""
    method = {"kind": kind, "rank": 16, "alpha": 32, "dropout": 0.0, "targets": "all-linear", "backend": "auto"}
    train = {"seq_len": seq_len, "gradient_checkpointing": checkpointing, "fused_loss": fused, "optimizer": "adamw", "seed": 1}
    return {"model": model, "method": method, "train": train, "precision": precision, "device": device, "micro_batch": rows}


def _dry(config: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    from homelab.worker.tools.memory_dry_run import Situation, dry_run

    situation = Situation(run["device"], run["precision"], run["micro_batch"], masked=run["micro_batch"] > 1)
    return dry_run(config, run["method"], run["train"], situation)


def _analytic(config: dict[str, Any], run: dict[str, Any], names: tuple[str, ...] = rank_memory.SEEN_BY_A_DRY_RUN) -> int:
    shape = from_config(config)
    assert shape is not None
    method = Method(kind=run["method"]["kind"], rank=run["method"]["rank"])
    settings = {key: run["train"][key] for key in ("seq_len", "gradient_checkpointing", "fused_loss", "optimizer")}
    train = Train(global_batch=64, steps=1, learning_rate=1e-3, **settings)
    items = rank_memory.estimate(shape, method, train, rank_memory.RankSetup(run["precision"], run["device"], run["micro_batch"]))
    return sum(item.size_bytes for item in items if item.name in names)


def foretold(config: dict[str, Any], run: dict[str, Any]) -> dict[str, int]:
    """Bytes that the dry run says, and with what the plan adds for the allocator and cuBLAS."""
    dry = int(_dry(config, run)["peak_bytes"])
    return {"dry_run_bytes": dry, "predicted_bytes": dry + _analytic(config, run, (rank_memory.WORKSPACES, rank_memory.ALLOCATOR))}


def _save(folder: Path, config: dict[str, Any]) -> Path:
    """A random model with this config, as a folder that the worker can load."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {key: value for key, value in config.items() if key != "model_type"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


_REST_OF_TRAIN = {
    "steps": 1,
    "global_batch": 1,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "schedule": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}


def _load(folder: Path, run: dict[str, Any]) -> Any:
    from homelab.worker.model.build import load_model

    recipe = {"model": {"name": str(folder), "revision": None}, "method": run["method"], "train": {**_REST_OF_TRAIN, **run["train"]}}
    return load_model(alone(folder, recipe, run["device"], run["precision"]), str(folder), lambda text: None)


def _batch(run: dict[str, Any], vocabulary: int, device: str) -> dict[str, Any]:
    """Rows of full length; with several rows the first is a little shorter, so that attention needs a mask."""
    import torch

    tokens = torch.randint(0, vocabulary, (run["micro_batch"], run["train"]["seq_len"]), device=device)
    mask = torch.ones_like(tokens)
    if run["micro_batch"] > 1:
        mask[0, -3:] = 0
    return {"input_ids": tokens, "labels": tokens.clone()} | ({"attention_mask": mask} if run["micro_batch"] > 1 else {})


class _RealStep:
    """torch's own AdamW as the worker takes it, fused on a card; its state is made at once, by a step that changes nothing."""

    def __init__(self, trainable: list[Any], train: dict[str, Any], device: str) -> None:
        import torch

        self.optimizer = torch.optim.AdamW(trainable, lr=0.0, fused=device == "cuda")
        self.optimizer.step()

    def step(self) -> None:
        """One step."""
        self.optimizer.step()


def _real_step(folder: Path, run: dict[str, Any]) -> int:
    from homelab.worker.tools.memory_dry_run import follow

    model = _load(folder, run)
    batch = _batch(run, model.config.vocab_size, "cpu")
    tracker = follow(model, batch, run["method"], run["train"], precision=run["precision"], device="cpu", optimizer=_RealStep)
    return int(tracker.peak_bytes)


def _on_cuda(folder: Path, runs: list[dict[str, Any]], rows: list[tuple[str, str]]) -> dict[str, float]:
    """Real steps on the first card, each in a process of its own: a context is only given back with its process."""
    measured = []
    for name, config in _ON_CUDA.items():
        model = _save(folder / name, config)
        for kind, checkpointing, fused, (seq_len, count) in itertools.product(
            ("lora", "qlora", "full"), (True, False), (True, False), ((512, 1), (1024, 4))
        ):
            run = situation(name, kind, "bf16", "cuda", seq_len, count, checkpointing, fused)
            text = f"from benchmarks import memory; memory.one_on_cuda({str(model)!r}, {run!r})"
            variables = os.environ | ranks.ALLOCATOR_OF_RUNS
            done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, env=variables)
            if done.returncode != 0:
                run["problem"] = (done.stderr.strip().splitlines() or ["?"])[-1]
                runs.append(run)
                continue
            reserved, allocated, process = (int(word) for word in done.stdout.split()[-3:])
            prediction = foretold(config, run)
            dry, predicted = prediction["dry_run_bytes"], prediction["predicted_bytes"]
            run |= prediction | {
                "reserved_bytes": reserved, "allocated_bytes": allocated, "process_bytes": process,
                "predicted_process_bytes": predicted + rank_memory.CONTEXT_BYTES,
                "error_percent": 100 * (predicted / reserved - 1), "dry_run_over_allocated_percent": 100 * (dry / allocated - 1),
            }  # fmt: skip
            measured.append(run)
        rows.append((f"accelerate estimate-memory, {name}", _accelerate(config)))
    runs += measured
    if not measured:
        return {}
    errors = [run["error_percent"] for run in measured]
    rows += [
        ("predicted over max_memory_reserved, %", report.spread(errors)),
        ("dry run over max_memory_allocated, %", report.spread([run["dry_run_over_allocated_percent"] for run in measured])),
        (
            "predicted over nvidia-smi's process, %",
            report.spread([100 * (r["predicted_process_bytes"] / r["process_bytes"] - 1) for r in measured if r["process_bytes"]] or [0.0]),
        ),
    ]
    return {
        "cuda_median_error_percent": statistics.median(map(abs, errors)),
        "cuda_worst_error_percent": max(map(abs, errors)),
        "cuda_false_fits": float(sum(run["allocated_bytes"] > run["predicted_bytes"] for run in measured)),
    }


def one_on_cuda(folder: str, run: dict[str, Any]) -> None:
    """Two steps as the worker does them; prints bytes reserved, allocated, and held by this process as nvidia-smi says."""
    import torch
    from accelerate.utils import convert_outputs_to_fp32

    warnings.simplefilter("ignore")
    torch.cuda.set_device(0)
    model = _load(Path(folder), run).train()
    if run["method"]["kind"] == "full":
        model = model.to("cuda")
    batch = _batch(run, model.config.vocab_size, "cuda")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    stepper = _RealStep(trainable, run["train"], "cuda")
    forward = convert_outputs_to_fp32(torch.autocast("cuda", torch.bfloat16)(model.forward))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        loss = forward(**batch, num_items_in_batch=torch.tensor(1000, device="cuda"))["loss"] * 1
        loss.backward()
        del loss
        stepper.step()
    torch.cuda.synchronize()
    held = smi.held_bytes([os.getpid()])
    print(torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated(), *held or [0])


def _accelerate(config: dict[str, Any]) -> str:
    """What `accelerate estimate-memory` reckons for training this, by its own functions: its command asks the hub for the model."""
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in config.items() if key != "model_type"}
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings))
    size, _ = calculate_maximum_sizes(model)
    return f"{max(estimate_training_usage(size, 'bfloat16').values()) / 1e9:.2f} GB, whatever the method, the rows and their length"


if __name__ == "__main__":
    sys.exit(main())
