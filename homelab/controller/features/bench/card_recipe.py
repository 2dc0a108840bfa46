"""Which card of a node is measured, or why not, and what is trained on it: a model of a known shape that fits, and its recipe. Pure.

Two shapes for cards: eight layers as wide as those of an 8B model, which keep any card busy for a pass of 4,096 tokens, and eight of 1.1B for what
has no room for them. A CPU gets one that it can do in a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.units import binary_size
from homelab.controller.facts import nvidia_answer
from homelab.controller.facts.node import Facts
from homelab.controller.planning.machines import cards
from homelab.controller.planning.machines.machines import host_memory
from homelab.controller.planning.speed.measured_cards import MeasuredCard, Shape
from homelab.shared.protocol.card_messages import GpuFacts

GIB = 2**30
Kind = Literal["lora", "qlora"]


@dataclass(frozen=True)
class CardRecipe:
    """A shape, the longest row, rows of a pass, passes of a step, and for how long it is measured.

    `needs_gib`: free memory that each method asks for, `host_gib`: of the machine, in which the weights are made."""

    shape: Shape
    seq_len: int
    micro_batch: int
    accumulation: int
    measure_s: float
    needs_gib: dict[Kind, float]
    host_gib: float

    def row(self, *, kind: Kind, precision: str, **measured: Any) -> dict[str, Any]:
        """The keys of a `MeasuredCard` that the recipe decides, and those that were measured."""
        return {
            "method": kind, "precision": precision, "shape": self.shape.model_dump(exclude_none=True), "rank": 16, "targets": "all-linear", "gradient_checkpointing": True,
            "fused_loss": True, "seq_len": self.seq_len, "micro_batch": self.micro_batch, "accumulation": self.accumulation, **measured,
        }  # fmt: skip

    def request(self, row: dict[str, Any], device: str) -> dict[str, Any]:
        """What the node is told (`homelab.worker.tools.card_speed`)."""
        train = {
            "seq_len": self.seq_len, "seed": 0, "learning_rate": 1e-5, "warmup_steps": 0, "schedule": "constant", "optimizer": "adamw", "weight_decay": 0.0,
            "max_grad_norm": 1.0, "gradient_checkpointing": row["gradient_checkpointing"], "fused_loss": row["fused_loss"],
        }  # fmt: skip
        method = {"kind": row["method"], "rank": row["rank"], "alpha": row["rank"], "dropout": 0.0, "targets": row["targets"]}
        return {
            "shape": row["shape"], "method": method, "train": train, "device": device, "precision": row["precision"], "micro_batch": self.micro_batch,
            "accumulation": self.accumulation, "measure_s": self.measure_s,
        }  # fmt: skip


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> Shape:
    return Shape(
        model_type="llama", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=intermediate,
        vocab_size=vocabulary, tie_word_embeddings=False,
    )  # fmt: skip


WIDE = CardRecipe(_llama(4096, 8, 32, 8, 14_336, 32_000), 1024, 4, 2, 60.0, {"lora": 7.2, "qlora": 4.5}, 5.5)
NARROW = CardRecipe(_llama(2048, 8, 32, 4, 5632, 32_000), 1024, 4, 2, 60.0, {"lora": 3.0, "qlora": 2.3}, 2.5)
CPU = CardRecipe(_llama(256, 4, 4, 2, 688, 2048), 128, 2, 2, 10.0, {"lora": 1.2, "qlora": 1.2}, 1.2)


def choose(device: str, kind: Kind, free_bytes: int | None, host_bytes: int | None) -> CardRecipe | None:
    """The widest shape that has room in so much free memory of the card and of its machine (None: not known, taken as enough); None where none has."""

    def has_room(one: CardRecipe) -> bool:
        return all(free is None or needed * GIB <= free for needed, free in ((one.needs_gib[kind], free_bytes), (one.host_gib, host_bytes)))

    return next(filter(has_room, (WIDE, NARROW) if device == "cuda" else (CPU,)), None)


def parameters(row: MeasuredCard) -> int:
    """Of the model of a row."""
    shape = row.architecture()
    assert shape is not None
    return shape.total


def refuse_unready(node: str, facts: Facts, kind: Kind) -> None:
    """Raises HomelabError where packages are missing, or a run is at work on the node."""
    needed = ("torch", "transformers", "peft", "accelerate", *(("bitsandbytes",) if kind == "qlora" else ()))
    missing = [name for name in needed if name not in facts.python.packages]
    if missing:
        raise HomelabError(
            f"this node's Python has no {', '.join(missing)}", where=f"node {node}, {facts.python.executable}", hint=homelab("setup", node)
        )
    if facts.runs.alive:
        run = facts.runs.alive[0]
        raise HomelabError(
            "a run is working on this node: a card that already trains cannot be measured", where=f"node {node}, run {run}",
            hint=Hint("wait until it ends ({}), or stop it: {}", homelab("status", run), homelab("stop", run)),
        )  # fmt: skip


def card_of(node: str, facts: Facts, index: int | None) -> GpuFacts | None:
    """The card that is measured; None for the CPU of a node without cards. Raises InputError for a number that is none, HomelabError for a card in use."""
    everything = cards.everything(facts)
    if index is None:
        card = facts.gpu.cards[0] if facts.gpu.cards else None
    else:
        card = next((one for one in everything if one.index == index), None)
        if card is None:
            there = ", ".join(f"{one.index} ({cards.short(one.name)})" for one in everything) or "none"
            raise InputError(
                f"this node has no card {index}; it has {there}", where=f"--card, node {node}", hint=homelab("bench card", node)
            )
    holders = [one for one in card.holders if "C" in one.type] if card else []
    if card and holders:
        by = ", ".join(f"{one.program or 'a process'}{f' (pid {one.pid})' if one.pid else ''}" for one in holders[:3])
        raise HomelabError(
            f"another program computes on this card: {by}", where=f"node {node}, GPU {card.index} ({cards.short(card.name)})",
            hint=Hint("end it there, then run again: {}", homelab("bench card", node)),
        )  # fmt: skip
    return card


def recipe_of(node: str, facts: Facts, card: GpuFacts | None, kind: Kind) -> CardRecipe:
    """The widest model that has room. Raises HomelabError where none has."""
    total, held = host_memory(facts.system)
    host = None if total is None else total - held
    free = host if card is None or nvidia_answer.shares_memory(card, facts) else card.free_bytes
    recipe = choose("cuda" if card else "cpu", kind, free, host)
    if recipe is None:
        smaller = homelab("bench card", node, "--method qlora" if kind == "lora" else "")
        hint = Hint(
            "end the programs that use it (nvidia-smi, or ps aux --sort=-rss | head, names them){}: {}",
            ", or measure with a smaller base" if kind == "lora" else "; then",
            smaller,
        )
        rest = f"; of the machine {binary_size(host)}" if card and host is not None else ""
        free_text = "an unknown part" if free is None else binary_size(free)
        raise HomelabError(f"there is no room for a test model: {free_text} of its memory is free{rest}", where=f"node {node}", hint=hint)
    return recipe
