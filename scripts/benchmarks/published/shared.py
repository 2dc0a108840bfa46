"""Published rows as rows of the table that the package ships (homelab/controller/planning/speed/measured_cards.jsonl), marked as others' by their source.

python -m benchmarks.published.shared (in scripts/) prints them; a row without seconds, or of another method, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.published import rows
from benchmarks.published.models import CONFIGS
from benchmarks.published.rows import Row

from homelab.controller.planning.model import known_models
from homelab.controller.planning.speed.measured_cards import MeasuredCard, Shape


def shared(published: Iterable[Row]) -> list[MeasuredCard]:
    """The rows whose seconds tell something of ours, and whose tokens were counted and not assumed."""
    return [_row(one) for one in published if one.tokens_per_s is not None and not one.why_untimed and "assumed" not in one.note]


def _row(row: Row) -> MeasuredCard:
    assert row.tokens_per_s is not None
    train, method = row.recipe["train"], row.recipe["method"]
    config = CONFIGS.get(row.model.lower()) or known_models.config_of(row.model) or {}
    micro_batch = row.recipe["parallel"]["micro_batch"]
    settings: dict[str, Any] = {
        key: value for key, value in {"rank": method.get("rank"), "targets": method.get("targets")}.items() if value is not None
    }
    if isinstance(settings.get("targets"), list):
        settings["targets"] = tuple(settings["targets"])
    return MeasuredCard(
        card=row.card, source=row.source, method=method["kind"], precision="bf16" if train["precision"] == "auto" else train["precision"],
        shape=_shape(config), **settings, gradient_checkpointing=train["gradient_checkpointing"], fused_loss=train["fused_loss"],
        seq_len=train["seq_len"], micro_batch=micro_batch, accumulation=train["global_batch"] // micro_batch // row.cards,
        tokens_per_s=round(row.tokens_per_s / row.cards, 1),
        peak_bytes=round(row.memory_gb * 1e9) if row.memory_gb and row.memory_kind in ("allocated", "reserved") else None,
    )  # fmt: skip


def _shape(config: dict[str, Any]) -> Shape:
    named = {key: config[key] for key in Shape.model_fields if config.get(key) is not None}
    return Shape(**{"num_key_value_heads": config["num_attention_heads"], "tie_word_embeddings": False, **named})


def main() -> None:
    """One line of JSON for each row."""
    for row in shared(rows.read(rows.OWN)):
        print(row.model_dump_json(exclude_defaults=True))


if __name__ == "__main__":
    main()
