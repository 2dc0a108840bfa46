"""The recipes of recipes/models: what `homelab new` decides for 5,000 chats, each for the smallest card that has room. `scripts/docs --texts` writes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from homelab.controller.config.cluster import Cluster, Gpu, Node
from homelab.controller.features.new import data_look, recipe_text, training_choice
from homelab.controller.features.new.decisions import Rows
from homelab.controller.features.new.training_choice import Attempt, Seen, Wish
from homelab.controller.planning.inputs import PlanInputs

CARDS = {8: "RTX 4060", 12: "RTX 3060", 16: "RTX 4060 Ti", 24: "RTX 3090"}
ROWS = Rows(count=5000, longest=1024, tokens=2_500_000, loss_part=0.5, is_counted=True)
_DATA = "~/datasets/my-chats.jsonl"
_SCHEMA = "#:schema ../schemas/recipe.json\n"
HELD = {"lora": "16 bits", "qlora": "4 bits"}


class Purpose(NamedTuple):
    """Who should take this model. `purpose` is a sentence."""

    model: str
    purpose: str


RECIPES = {
    "first-try-qwen3-0.6b": Purpose("Qwen/Qwen3-0.6B", "A first training on your own machines: small enough for any card."),
    "phone-gemma3-1b": Purpose("google/gemma-3-1b-it", "A small model that later runs on a phone. First accept its licence on the hub."),
    "laptop-qwen3-1.7b": Purpose("Qwen/Qwen3-1.7B", "A model that later answers on a laptop without a card."),
    "chat-llama3.2-3b": Purpose("meta-llama/Llama-3.2-3B-Instruct", "A small chat model. First accept its licence on the hub."),
    "chat-smollm3-3b": Purpose("HuggingFaceTB/SmolLM3-3B", "A small chat model whose own training data is public, too."),
    "chat-qwen3-4b": Purpose("Qwen/Qwen3-4B-Instruct-2507", "A chat model that answers at once, without a chain of thought."),
    "code-qwen2.5-7b": Purpose("Qwen/Qwen2.5-Coder-7B-Instruct", "Code in the style of your own repositories."),
    "assistant-llama3.1-8b": Purpose("meta-llama/Llama-3.1-8B-Instruct", "An assistant that calls tools. First accept its licence on the hub."),
    "reasoning-qwen3-8b": Purpose("Qwen/Qwen3-8B", "A model that writes a chain of thought, if the rows show one."),
    "knowledge-phi4-14b": Purpose("microsoft/phi-4", "Exact answers from textbooks and manuals."),
    "reasoning-qwen3-14b": Purpose("Qwen/Qwen3-14B", "A chain of thought by a larger model."),
    "writing-mistral-small-24b": Purpose("mistralai/Mistral-Small-24B-Instruct-2501", "Long texts in European languages."),
    "largest-qwen3-32b": Purpose("Qwen/Qwen3-32B", "The largest of these models, for the largest home cards."),
}  # fmt: skip


def sizes(model: str) -> dict[int, Attempt]:
    """By the memory of one card (GB), the smallest first: the decisions for it. Only cards on which rows of 1,024 tokens have room whole."""
    found = {}
    for size_gb, card in CARDS.items():
        cluster = Cluster(nodes=(Node(name="one-card", host="localhost", gpus=(Gpu(model=card, vram_gb=float(size_gb)),)),))
        inputs = PlanInputs(cluster, data_look.draft(_DATA, model), {}, "plan", 29500)
        wish = Wish(_DATA, model, Path.home() / "recipe.toml", offline=True)
        attempt = training_choice.choose(wish, model, Seen(None, (), inputs, ()), ROWS)
        if attempt.is_resident and attempt.recipe.train.seq_len >= ROWS.longest:
            found[size_gb] = attempt
    return found


def text(name: str) -> str:
    """One recipe, whole: for the smallest card."""
    model, purpose = RECIPES[name]
    fitting = sizes(model)
    size_gb, attempt = next(iter(fitting.items()))
    reasons = {"model.name": "this recipe's model", "data.train": "put your chats there, on every node; or name a file beside this one"}
    decisions = [
        dataclasses.replace(one, reason=reasons.get(one.place, one.reason), value=_DATA if one.place == "data.train" else one.value)
        for one in attempt.decisions
        if one.place != "train.precision"  # that of the machines that train it
    ]
    kind = attempt.recipe.method.kind
    whole_gb = next((size for size, other in fitting.items() if other.recipe.method.kind == "lora"), None)
    whole = "" if kind == "lora" else f" The base in 16 bits needs {f'{whole_gb} GB' if whole_gb else 'more than 24 GB'}."
    head = [
        f"{recipe_text.HEAD.removeprefix('# ')}. {purpose}",
        f"It fits a card with {size_gb} GB, the base in {HELD[kind]}.{whole} Planned, not measured.",
        f"The values are those for {ROWS.count:,} chats of {ROWS.tokens // ROWS.count} tokens, the longest of {ROWS.longest:,}.",
        f"For your own chats: homelab new CHATS.jsonl --model {model}",
    ]
    return _SCHEMA + recipe_text.fresh(head, decisions).text


def write(folder: Path) -> None:
    """All of them into recipes/models, and nothing else in it."""
    folder.mkdir(exist_ok=True)
    for file in folder.glob("*.toml"):
        file.unlink()
    for name in RECIPES:
        (folder / f"{name}.toml").write_text(text(name), encoding="utf-8")
