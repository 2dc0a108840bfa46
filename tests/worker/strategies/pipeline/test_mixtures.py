"""A mixture of experts in three stages trains as one process does. A token takes its experts alone, whatever rows are beside it.

Where two experts are as good as equal for a token, the last digits of a sum decide which one it takes, and rows of other lengths beside it change these.
One process does so, too. `SEED` is one where no token of these runs stands at such a place; with seed 1 gpt_oss has one, in step 3: a loss that differs by 4e-4.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness
from tests.worker.model.tiny_models import SIGHT
from tests.worker.strategies.test_streamed import of, trained
from tests.worker.training.test_exactness import COMMON, LENGTH, LONG, SHORT, assert_every_sample_once_per_epoch, assert_the_same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
LAYERS = 6
# The adapters of this seed have no gradient that is as good as zero (tests/worker/training/test_exactness.py): measured at worst, in six steps, are 4e-7
# (first gradient), 2e-7 (losses) and 4e-6 (weights).
SEED, TRAINED_FROM = 2, 5
# The rounding of the delta rule is ten times that of attention, so a router more often stands at such a place: ddp differs with 5 by 2e-5 in the last loss, with
# 6 and 7 by 3e-4 in one matrix after six steps.
TRAINED_FROM_OF = {"qwen3_5_moe_text": 8}
STAGES, MICRO_BATCH = [3, 1, 2], 2
CLIPPED_AT = 0.05
_FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA: dict[str, Any] = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "full_attention_interval": 3,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "head_dim": 16, **_FEW},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 24},
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, **_FEW,
    },
    "qwen3_5_moe_text": {"num_experts": 6, "shared_expert_intermediate_size": 32, **_FEW, **_DELTA},
    "qwen3_5_text": _DELTA,
    "gemma4_text": {
        "hidden_size_per_layer_input": 0, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip
# Of one process, other micro-batches alone change a gradient of the delta rule by 1e-5 (of one matrix, at worst; of the heads' decays by 6e-5): by 1e-13 if
# all computes in 64 bits. Large steps make more of it.
DELTA = ("qwen3_5_moe_text", "qwen3_5_text")
Mixture = Callable[[str], Path]
Trained = Callable[[str, str, int], Path]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Mixture:
    """The folder of a tiny model of this family, whose experts and routers matter."""
    root = tmp_path_factory.mktemp("mixtures")

    def make(kind: str) -> Path:
        folder = root / kind
        if not folder.is_dir():
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model)
            torch.manual_seed(SEED)
            sizes = {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            }
            ends = {
                "vocab_size": len(tokenizer), "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
                "initializer_range": 0.08,
            }  # fmt: skip
            config = AutoConfig.for_model(kind, **{**sizes, **ends, **FAMILIES[kind]})
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    return make


def recipe(family: str, kind: str, steps: int) -> dict[str, Any]:
    calm = {"train__learning_rate": 1e-4} if family in (*DELTA, "gemma4_text") else {}
    fixed = {
        "method__kind": kind,
        "data__packing": False,
        "train__max_grad_norm": CLIPPED_AT,
        "train__seed": TRAINED_FROM_OF.get(family, TRAINED_FROM),
    }
    return COMMON | LENGTH[steps] | fixed | calm


def rounds(family: str, kind: str) -> float:
    """How much more of a gradient is rounding than in other families."""
    if family == "gemma4_text":  # its attention is sharp: queries and keys have norms, and their products are not divided
        return 5.0
    return (100.0 if kind == "full" else 20.0) if family in DELTA else 1.0


@pytest.fixture(scope="module")
def alone(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, mixture: Mixture, data: Path) -> Trained:
    """The run of one process, by family, method and steps."""
    root, found = tmp_path_factory.mktemp("one"), dict[tuple[str, str, int], Path]()

    def train(family: str, kind: str, steps: int) -> Path:
        key = family, kind, steps
        if key not in found:
            found[key] = harness.make_run(root / f"{family} {kind} {steps}", mixture(family), data, **recipe(family, kind, steps))
            forks.train(found[key], 1, [12], micro_batch=5)
        return found[key]

    return train


CASES = [("mixtral", "lora", SHORT)]
MORE = [
    *((family, "lora", SHORT) for family in FAMILIES if family != "mixtral"), ("qwen3_moe", "lora", LONG), ("deepseek_v3", "lora", LONG),
    ("deepseek_v3", "qlora", SHORT), ("qwen3_moe", "full", SHORT), ("mixtral", "full", SHORT), ("olmoe", "qlora", SHORT), ("qwen3_5_text", "qlora", SHORT),
    ("qwen3_5_text", "full", SHORT), ("qwen3_5_moe_text", "qlora", SHORT), ("gemma4_text", "qlora", SHORT), ("gemma4_text", "full", SHORT),
]  # fmt: skip


@pytest.mark.parametrize(("family", "kind", "steps"), [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE)])
def test_three_stages_train_as_one_process(
    family: str, kind: str, steps: int, forks: harness.Forks, alone: Trained, tmp_path: Path, mixture: Mixture, data: Path
) -> None:
    run = harness.make_run(tmp_path / "run", mixture(family), data, **recipe(family, kind, steps))
    forks.train(run, 1, [12, 0, 0], stages=STAGES, micro_batch=MICRO_BATCH, timeout_s=150)
    assert_the_same(run, alone(family, kind, steps), {1: (1, 3)}, steps, CLIPPED_AT, worse=rounds(family, kind))
    assert_every_sample_once_per_epoch(run, 3, steps)
    if kind != "full":
        assert harness.adapter_settings(run) == harness.adapter_settings(alone(family, kind, steps)), (
            "of all layers, and not of the head's stage"
        )
    shutil.rmtree(run / "checkpoints")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of a tiny model that is trained with its part for images beside it."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    folder, tokenizer = tmp_path_factory.mktemp("seeing") / "gemma3", AutoTokenizer.from_pretrained(model)
    text = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": len(tokenizer), "max_position_embeddings": 512, "sliding_window": 24, "query_pre_attn_scalar": 16, "initializer_range": 0.08,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(SEED)
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=SIGHT, mm_tokens_per_image=1)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_stages_of_a_model_that_sees_train_as_one_process(
    kind: str, packing: bool, forks: harness.Forks, tmp_path: Path, seeing: Path, data: Path
) -> None:
    """The part for images is on no stage, and no weight of it is trained."""
    changes = recipe("gemma3", kind, SHORT) | {"data__packing": packing}
    one, run = (harness.make_run(tmp_path / name, seeing, data, **changes) for name in ("one", "run"))
    forks.train(one, 1, [12], micro_batch=5)
    forks.train(run, 1, [12, 0, 0], stages=[1, 3, 2], micro_batch=MICRO_BATCH, timeout_s=150)
    assert_the_same(run, one, {1: (1, 3)}, SHORT, CLIPPED_AT)
    assert harness.adapter_settings(run) == harness.adapter_settings(one)
    assert not any("vision" in name for name in harness.weights(one, SHORT))


def test_a_model_that_sees_trains_where_one_rank_alone_has_layers_from_its_host(
    forks: harness.Forks, tmp_path: Path, seeing: Path, data: Path
) -> None:
    """That rank has no part for images; the other one has it, and both compare their weights before they start."""
    changes = recipe("gemma3", "lora", SHORT) | {"train__gradient_checkpointing": True}
    one, run = (harness.make_run(tmp_path / name, seeing, data, **changes) for name in ("one", "run"))
    forks.train(one, 1, [12], micro_batch=5)
    forks.train(run, 1, [7, 5], streaming=[of(3, 2), None], micro_batch=MICRO_BATCH, timeout_s=150)
    assert_the_same(run, one, {1: (1, 2)}, SHORT, CLIPPED_AT)
    assert harness.adapter_settings(run) == harness.adapter_settings(one)


STREAMED: list[tuple[str, str, list[int], list[dict[str, Any] | None], dict[str, Any]]] = [
    ("mixtral", "lora", [12], [of(6)], {}),
    ("gpt_oss", "lora", [12], [of(4, 2)], {}),
    ("deepseek_v3", "qlora", [12], [of(6, 2)], {}),
    ("qwen3_moe", "qlora", [12, 0, 0], [of(3), None, of(2, 1, 1)], {"stages": STAGES}),
    ("qwen3_5_text", "lora", [12], [of(6, 2)], {}),
    ("gemma4_text", "lora", [12], [of(6, 2)], {}),
    ("qwen3_5_moe_text", "qlora", [12, 0, 0], [of(3), None, of(2, 1, 1)], {"stages": STAGES}),
    ("mixtral", "lora on experts", [12], [of(4, 2)], {}),
    ("qwen3_moe", "qlora on experts", [12], [of(6, 2)], {}),
    ("olmoe", "lora on experts", [12, 0, 0], [of(3), None, of(2, 1, 1)], {"stages": STAGES}),
]


@pytest.mark.parametrize(
    ("family", "kind", "shares", "streaming", "plan"),
    [
        pytest.param(*case, id=" ".join(case[:2]), marks=[] if case[:2] == ("mixtral", "lora on experts") else pytest.mark.thorough)
        for case in STREAMED
    ],
)
def test_experts_from_the_host_train_as_resident_ones(
    family: str, kind: str, shares: list[int], streaming: Any, plan: dict[str, Any], forks: harness.Forks, tmp_path: Path, mixture: Mixture, data: Path
) -> None:  # fmt: skip
    """To the last bit; the first layer of deepseek_v3 has no experts."""
    runs, method = [], kind.partition(" on ")[0]
    targets: dict[str, Any] = {"method__targets": "all-linear+experts"} if method != kind else {}
    for own, which in (("resident", None), ("streamed", streaming)):
        run = harness.make_run(
            tmp_path / own, mixture(family), data, **recipe(family, method, SHORT), **targets, train__gradient_checkpointing=True
        )
        forks.train(run, 1, shares, streaming=which, micro_batch=MICRO_BATCH, timeout_s=150, **plan)
        runs.append(run)
    assert harness.losses(runs[0], 1) == harness.losses(runs[1], 1)
    one, other = (trained(run, SHORT) for run in runs)
    assert one.keys() == other.keys() and [name for name in one if not one[name].equal(other[name])] == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "strategy", "kind"),
    [
        *((family, "ddp", "lora") for family in FAMILIES),
        *(("mixtral", strategy, kind) for strategy, kind in (("zero2", "lora"), ("zero3", "lora"), ("zero3", "full"))),
        ("qwen3_5_text", "zero3", "full"),
    ],
)
def test_other_strategies_train_as_one_process(
    family: str, strategy: str, kind: str, forks: harness.Forks, alone: Trained, tmp_path: Path, mixture: Mixture, data: Path
) -> None:
    run = harness.make_run(tmp_path / "run", mixture(family), data, **recipe(family, kind, SHORT))
    forks.train(run, 1, [6, 4, 2], strategy=strategy, micro_batch=[2, 1, 2], timeout_s=150)
    assert_the_same(run, alone(family, kind, SHORT), {1: (1, 3)}, SHORT, CLIPPED_AT, worse=rounds(family, kind))
    shutil.rmtree(run / "checkpoints")


def test_a_dropped_token_is_seen(forks: harness.Forks, alone: Trained, tmp_path: Path, mixture: Mixture, data: Path) -> None:
    """The comparison above is one that can fail: experts with a capacity drop what comes after it, and who is beside a token decides."""
    changes = recipe("mixtral", "lora", SHORT) | {"train__steps": 2}
    run, one = harness.make_run(tmp_path / "run", mixture("mixtral"), data, **changes), alone("mixtral", "lora", SHORT)
    codes, output = forks.run(
        run, 1, [12, 0, 0], stages=STAGES, micro_batch=MICRO_BATCH, entry="tests.worker.strategies.pipeline.test_mixtures:dropped"
    )
    assert codes == [0, 0, 0], output
    assert harness.relative_error(harness.first_gradient(run), harness.first_gradient(one)) > 1e-4
    assert harness.losses(run, 1)[1] != pytest.approx(harness.losses(one, 1)[1], rel=1e-6)


def dropped() -> int:
    """A worker whose experts take at most as many tokens of a pass as each would get of equal parts."""
    import torch
    from transformers.models.mixtral import modeling_mixtral

    from homelab.worker.training.train import main

    route = modeling_mixtral.MixtralTopKRouter.forward

    def forward(self: Any, hidden_states: Any) -> Any:
        logits, scores, chosen = route(self, hidden_states)
        taken = torch.zeros(chosen.shape[0] * chosen.shape[1], self.num_experts).scatter_(1, chosen.reshape(-1, 1), 1).cumsum(0)
        place = taken.gather(1, chosen.reshape(-1, 1)).view_as(chosen)
        scores = scores * (place <= chosen.numel() // self.num_experts)
        return logits, scores, chosen

    modeling_mixtral.MixtralTopKRouter.forward = forward
    return main()
