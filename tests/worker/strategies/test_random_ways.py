"""Random recipes, each computed in random ways one after the other: the training is that of one process.

Other tests try what somebody thought of. This one tries what lies between: keys of a recipe that nobody has put together, a resumed pipeline whose first attempt
streamed, a model that sees beside one that does not. A seed is a case for ever, as long as nobody edits what draws here.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness
from tests.worker.model import odd_models
from tests.worker.strategies.pipeline.test_ends import saved as saved_llama
from tests.worker.strategies.pipeline.test_mixtures import LAYERS, Mixture, mixture, seeing  # noqa: F401 - fixtures
from tests.worker.strategies.test_streamed import of
from tests.worker.training.test_preferences import labelled, pairs

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(300)]
SEEDS = range(40)
EXPERTS = ("mixtral", "qwen3_moe", "olmoe")
KINDS = ("llama", "tied", "llama", "tied", "seeing", "MXFP4", "gemma4_text", "deepseek_v3", *EXPERTS)
# Relative. AdamW makes full steps of a gradient that is as good as zero, and 8-bit moments more of it; a token may stand between two experts.
LOSSES, WEIGHTS, WEIGHTS_OF_ROUNDED = 2e-5, 2e-4, 3e-3


def recipe_of(chance: random.Random, kind: str) -> dict[str, Any]:
    """Keys that decide about a training, and with what it is computed."""
    method = "lora" if kind == "MXFP4" else chance.choice(("lora", "lora", "qlora", "full"))
    method = "lora" if kind == "seeing" and method == "full" else method  # stages refuse it
    changes: dict[str, Any] = {
        "method__kind": method, "method__rank": chance.choice((2, 4, 8)), "train__seed": chance.randint(1, 9), "train__epochs": None, "train__steps": 5,
        "train__optimizer": chance.choice(("adamw", "adamw", "adamw", "adamw_8bit")), "train__gradient_checkpointing": chance.random() < 0.5,
        "train__fused_loss": chance.choice((True, False, "auto")) if kind not in ("gemma4_text", "seeing") else "auto",
        "train__schedule": chance.choice(("cosine", "linear", "constant")), "train__weight_decay": chance.choice((0.0, 0.1)),
        "train__max_grad_norm": chance.choice((0.05, 0.5, 100.0)), "train__warmup_steps": chance.choice((0, 2)),
        "train__global_batch": chance.choice((12, 12, 7, 5)), "train__learning_rate": chance.choice((1e-3, 3e-4)) if kind != "gemma4_text" else 1e-4,
        "data__eval_fraction": chance.choice((0.0, 0.1, 0.2)), "checkpoint__every_steps": chance.choice((1, 2)),
    }  # fmt: skip
    if method == "lora" and kind in ("llama", "tied") and chance.random() < 0.25:
        changes["method__base"] = "8bit"
    if method != "full" and kind in EXPERTS and chance.random() < 0.5:
        changes["method__targets"] = "all-linear+experts"
    if method != "full" and kind in ("llama", "tied") and chance.random() < 0.5:
        ends = chance.choice(
            (
                ["q_proj"],
                ["v_proj", "down_proj"],
                ["q_proj", "embed_tokens"],
                ["o_proj", "lm_head"],
                ["gate_proj", "embed_tokens", "lm_head"],
            )
        )
        changes["method__targets"] = ends
    if method != "full" and "method__targets" not in changes and chance.random() < 0.3:
        changes |= {"method__dropout": 0.1, "parallel__micro_batch": 1}
    elif chance.random() < 0.3 and kind not in ("gemma4_text", "deepseek_v3"):
        changes["objective__kind"] = chance.choice(("dpo", "ipo", "simpo", "orpo", "kto", "reward"))
    if "objective__kind" not in changes:
        # gpt-oss makes its masks without the positions, and packing is refused for that
        changes |= {"data__packing": chance.random() < 0.3 and kind != "MXFP4", "data__completion_only": chance.random() < 0.7}
    if changes["data__eval_fraction"]:
        every = chance.choice((1, 2))
        changes |= {
            "tracking__eval_every_steps": every,
            "train__keep_best": chance.random() < 0.4,
            "train__early_stopping": chance.choice((0, 0, 2)),
        }
    return changes


def parts_of(chance: random.Random, whole: int, parts: int, least: int = 0) -> list[int]:
    cuts = sorted(chance.randint(0, whole - least * parts) for _ in range(parts - 1))
    return [end - begin + least for begin, end in zip([0, *cuts], [*cuts, whole - least * parts], strict=True)]


def way_of(chance: random.Random, changes: dict[str, Any]) -> dict[str, Any]:
    """A plan for one attempt."""
    batch, frozen = changes["train__global_batch"], changes["method__kind"] != "full"
    divided = ("zero2", "zero3") if changes["train__optimizer"] == "adamw" else ()
    way, ranks = chance.choice(("one", "ddp", "ddp", "stages", "stages", *divided, *(("host",) if frozen else ()))), chance.choice((2, 3))

    def rows() -> int:
        return 1 if "method__dropout" in changes else chance.randint(1, 5)

    def from_host(layers: int, groups: Sequence[int]) -> dict[str, Any] | None:
        return of(chance.randint(1, layers), chance.choice(groups)) if chance.random() < 0.6 else None

    if way == "one":
        return {"shares": [batch], "micro_batch": rows()}
    if way == "host":
        ranks = chance.choice((1, 2))
        return {
            "shares": parts_of(chance, batch, ranks), "micro_batch": rows(), "streaming": [from_host(LAYERS, (1, 2, 99)) for _ in range(ranks)],
        }  # fmt: skip
    if way == "stages":
        order, stages = chance.sample(range(ranks), ranks), parts_of(chance, LAYERS, ranks, least=1)
        shares, streaming = [0] * ranks, [None] * ranks
        shares[order[0]] = batch
        for number, rank in enumerate(order if frozen else ()):
            streaming[rank] = from_host(stages[number], (1,))
        return {"shares": shares, "stages": stages, "stage_order": order, "micro_batch": rows(), "streaming": streaming}
    plan: dict[str, Any] = {"shares": parts_of(chance, batch, ranks), "strategy": way, "micro_batch": [rows() for _ in range(ranks)]}
    if way == "ddp" and chance.random() < 0.3:
        plan |= {"measured": True, "shares": parts_of(chance, batch, ranks, least=1)}
    if chance.random() < 0.3:
        plan["nodes"] = [f"node{rank}" for rank in range(ranks)]
    return plan


def evaluated(run: Path, attempt: int) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in harness.lines(run, attempt, 0, "metrics.jsonl", "eval")}


def final(run: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: weight for file in sorted((run / "final").glob("*.safetensors")) for name, weight in load_file(file).items()}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("rows")
    made = {"": harness.chat_rows(44), "kto": labelled(44), "pairs": pairs(44)}
    return {name: harness.write_jsonl(root / f"{name or 'chats'}.jsonl", content) for name, content in made.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, model: Path, mixture: Mixture, seeing: Path) -> Mixture:  # noqa: F811
    root = tmp_path_factory.mktemp("models")
    own = {name: saved_llama(root / name, is_tied=name == "tied") for name in ("llama", "tied")}
    own |= {"MXFP4": odd_models.in_four_float_bits(model, root, layers=LAYERS)[0], "seeing": seeing}
    return lambda kind: own[kind] if kind in own else mixture(kind)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_training_is_that_of_one_process(
    seed: int, forks: harness.Forks, tmp_path: Path, models: Mixture, rows: dict[str, Path]
) -> None:
    chance = random.Random(f"ways {seed}")
    kind = chance.choice(KINDS)
    changes = recipe_of(chance, kind)
    objective = changes.get("objective__kind", "")
    data = rows["pairs" if objective not in ("", "kto") else objective]
    one, run = (harness.make_run(tmp_path / who, models(kind), data, **changes) for who in ("one", "run"))
    forks.train(one, 1, [changes["train__global_batch"]], micro_batch=1 if "method__dropout" in changes else 3, timeout_s=150)
    expected, sampled, begin = harness.losses(one, 1), harness.samples(one, 1, 1), 0
    losses, evaluations, taken, ways = dict[int, float](), dict[int, float](), dict[int, list[int]](), []
    for attempt in range(1, chance.choice((1, 2, 2, 3)) + 1):
        ways.append(plan := way_of(chance, changes))
        print(kind, json.dumps(changes), begin, json.dumps(plan))  # shown where it fails
        forks.train(run, attempt, resume_step=begin, timeout_s=150, **plan)
        losses |= harness.losses(run, attempt)
        evaluations |= evaluated(run, attempt)
        seen = harness.samples(run, attempt, len(plan["shares"]))
        taken |= {step: ids for step, ids in seen.items() if step > begin}
        kept = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")]
        if not (earlier := sorted(step for step in kept if step < max(expected))):
            break
        begin = chance.choice(earlier)
    assert taken == sampled, "the same global batches"
    assert losses == pytest.approx(expected, rel=LOSSES) and evaluations == pytest.approx(evaluated(one, 1), rel=LOSSES)
    is_rounded = changes["train__optimizer"] != "adamw" or kind not in ("llama", "tied", "seeing")
    assert harness.whole_error(final(run), final(one)) <= (WEIGHTS_OF_ROUNDED if is_rounded else WEIGHTS)
    if changes["method__kind"] != "full":
        assert harness.adapter_settings(run) == harness.adapter_settings(one)
    shutil.rmtree(tmp_path)
