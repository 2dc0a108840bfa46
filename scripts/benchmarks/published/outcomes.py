"""Settings that did not fit in the hands of others, where homelab does no more than they did: a plan must not say that they fit."""

from __future__ import annotations

from benchmarks.published.rows import Row, row_of

_COLUMNS = ("source", "cards", "card", "vram_gb", "model", "method", "seq_len", "micro_batch", "rank", "targets", "gradient_checkpointing")
_OUT_OF_MEMORY = (
    ("LitGPT, tutorials/resource-tables.md", 1, "A100", 40, "meta-llama/Llama-2-7b-hf", "lora", 1304, 4, 8, "q_proj v_proj", False),
    ("LitGPT, config_hub", 1, "A10G", 24, "gemma-7b", "lora", 512, 1, 16, "all-linear", False),
    ("Answer.AI fsdp_qlora, DDP on 2", 2, "RTX 3090", 24, "meta-llama/Llama-2-7b-hf", "qlora", 2048, 10, 64, "all-linear", True),
)


def out_of_memory() -> list[Row]:
    """The rows, without figures."""
    rest = {
        "accumulation": "1", "fused_loss": "False", "optimizer": "adamw", "precision": "auto", "base": "auto", "strategy": "ddp", "memory_gb": "",
        "memory_kind": "", "tokens_per_s": "", "differs_from_homelab": "", "note": "",
    }  # fmt: skip
    return [row_of({**rest, **dict(zip(_COLUMNS, map(str, row), strict=True))}) for row in _OUT_OF_MEMORY]
