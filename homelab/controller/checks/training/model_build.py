"""model: the base model as one node built it without its weights: it can be trained in the recipe's way, and reads the recipe's rows."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.node_words import advice
from homelab.controller.base.units import decimal_size
from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence, Level
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.advice import excess
from homelab.shared.protocol import quantisation
from homelab.shared.protocol.worker_messages import BuildResult


@check(
    "model.name",
    "the hub has a model of that name, complete, and this token may download it",
    worst="fail",
    sees="build",
    after="model.licence",
)
def name(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail for a name or revision that the hub does not know, a gate, a token that it refuses, no way to it; warn where it is busy. Asked where no node has the model."""
    yield from _found(evidence, "hub")


@check(
    "model.kind",
    "the base model is a causal language model that the installed transformers builds",
    worst="fail",
    sees="build",
    after="model.files",
)
def kind(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail for a type that transformers does not know, code of its own, an encoder, a config.json that contradicts itself; warn where nobody could build it."""
    if evidence.build is not None and evidence.build.refused:
        hint = Hint(
            "{} tries it with a real step; to continue without this check: {}",
            homelab("plan RECIPE"),
            homelab("preflight --skip model.kind"),
        )
        yield evidence.build.node, Problem("warn", f"the base model was not tested: {evidence.build.refused}", hint)
    yield from _found(evidence, "kind")


@check("model.stored", "the method can train weights that are stored like these (GPTQ, AWQ, FP8, bitsandbytes)", worst="fail", sees="build")
def stored(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where a checkpoint is quantised already in a way that the method cannot train; warn where a quantised base leaves experts in 16 bits."""
    yield from _found(evidence, "stored")
    built = evidence.build
    if built is not None and built.loose_experts_bytes:
        in_8_bits = isinstance(evidence.recipe, TrainRecipe) and evidence.recipe.method.quantisation == quantisation.INT8
        why = (
            '8 bits are for linear layers alone, and kind = "qlora" for most experts, too'
            if in_8_bits
            else "homelab does not quantise their form"
        )
        message = f"the routed experts stay in 16 bits ({decimal_size(built.loose_experts_bytes)}): {why}"
        yield (
            built.node,
            Problem(
                "warn",
                message,
                Hint("{} says whether they fit; a dense model of that size is quantised completely", homelab("plan RECIPE")),
            ),
        )


@check("model.weights", "the files have the weights that config.json describes, with a language head", worst="fail", sees="build")
def weights(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where the weights have other sizes, or the head is missing and would start as random numbers."""
    yield from _found(evidence, "weights")


@check("model.adapters", "[method] targets names layers that the model has", worst="fail", sees="build")
def adapters(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where PEFT cannot put the adapters on this model."""
    yield from _found(evidence, "adapters")


@check("model.gradient", "every trained weight gets a gradient from text", worst="warn", sees="build")
def gradient(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """warn where weights that are to be trained cannot be reached by a text (towers for images and sounds)."""
    yield from _found(evidence, "gradient")


@check("model.tokenizer", "the base model's tokenizer loads", worst="fail", sees="sample", after="model.files")
def tokenizer(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where the tokenizer, tried on one node, does not load or cannot say which characters a token covers."""
    yield from _found(evidence, "tokenizer")  # of a model that no node has yet
    if isinstance(evidence.recipe, TrainRecipe) and evidence.sample is not None and evidence.sample.tokenizer is not None:
        error = evidence.sample.tokenizer
        yield (
            evidence.sample.node,
            Problem("fail", error.message, advice(evidence.sample.node, error.hint) or "copy the model's folder again"),
        )


@check("model.ids", "the embedding has a row for every token that the data holds", worst="fail", sees="build")
def ids(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where the data holds a token that the embedding lacks; warn where the tokenizer alone has one."""
    built = evidence.build
    if built is None or built.embedding_rows is None or built.largest_id is None or built.largest_id < built.embedding_rows:
        return
    named = ", ".join(f"{text!r} ({number})" for number, text in built.beyond.items())
    seen = f"the tokenizer has {named}, and the embedding has only the ids 0 to {built.embedding_rows - 1}"
    widen = (
        "does the tokenizer belong to this model? If not, copy the folder again. If tokens were added to it, enlarge the model: "
        "model.resize_token_embeddings(len(tokenizer)), save both, and name that folder in the recipe"
    )
    largest = max((file.largest_id for file in evidence.sample.files.values()), default=0) if evidence.sample is not None else 0
    if largest >= built.embedding_rows:
        yield built.node, Problem("fail", f"{seen}; the data holds such a token ({largest})", widen)
    else:
        yield built.node, Problem("warn", f"{seen}: a row with such a token would end the run (none of the sampled rows has one)", widen)


@check("model.positions", "seq_len is not longer than the model allows", worst="fail", sees="build")
def positions(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where the data has a row that is longer than the model's absolute positions; warn where seq_len allows one, and beyond rotary positions."""
    recipe, built = evidence.recipe, evidence.build
    if not isinstance(recipe, TrainRecipe):
        return
    seq_len, longest = recipe.train.seq_len, 0
    if evidence.sample is not None:
        longest = max((min(file.longest_tokens, seq_len) for file in evidence.sample.files.values()), default=0)
    if built is not None and built.positions is not None:
        if seq_len > built.positions:
            level: Level = "fail" if longest > built.positions else "warn"
            seen = f"seq_len is {seq_len}, and the model has {built.positions} positions"
            yield (
                built.node,
                Problem(
                    level, seen + _row_beyond(longest, built.positions), f"edit the recipe: [train] seq_len = {built.positions} or less"
                ),
            )
        return
    trained = excess.positions(recipe.model.name, evidence.facts, built.config if built is not None else None)
    if trained is not None and seq_len > trained:
        seen, edit = excess.beyond(seq_len, trained)
        yield "", Problem("warn", seen + _row_beyond(longest, trained), edit)


def _row_beyond(longest: int, most: int) -> str:
    return f"; the data has a row of {longest} tokens" if longest > most else ""


def _found(evidence: Evidence, topic: str) -> Iterator[tuple[str, Problem]]:
    built: BuildResult | None = evidence.build
    if built is None or _is_told(evidence, built.node):
        return
    for finding in built.findings:
        if finding.topic == topic:
            where = f" ({finding.where})" if finding.where and finding.where not in finding.message else ""
            hint = advice(built.node, finding.hint) or Hint("to read about it: {}", homelab("explain", f"model.{topic}"))
            yield built.node, Problem(finding.level, f"{finding.message}{where}", hint)


def _is_told(evidence: Evidence, node: str) -> bool:
    """Whether `model.there` has said already what this node's folder is, or lacks: one cause is one finding."""
    facts = evidence.facts.get(node)
    is_folder = isinstance(evidence.recipe, TrainRecipe) and evidence.recipe.model.is_folder
    return is_folder and facts is not None and facts.model is not None and not facts.model.found
