"""What a pipeline refuses before anything starts: each with what was seen, where, and the edit that mends it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.planning.machines import machines
from homelab.controller.planning.memory import rank_memory, recipe_edits
from homelab.controller.planning.memory.scenario import DoesNotFit
from homelab.controller.planning.model import families, known_models
from homelab.controller.planning.plan import make
from homelab.controller.planning.strategy import registry
from homelab.controller.planning.strategy.pipeline.micro_batching import MicroBatching
from homelab.controller.planning.work import job
from homelab.controller.planning.work.job import Job, TrainingJob
from homelab.shared.protocol import memory_items
from homelab.shared.recipe import Method
from tests import builders
from tests.builders import NAMES

LLAMA_2_13B = "meta-llama/Llama-2-13b-hf"


def job_of(
    cards_gb: list[list[float]], *, model: str = LLAMA_2_13B, precision: str = "bf16", config: dict[str, Any] | None = None, **tables: Any
) -> Job:  # fmt: skip
    """A qlora training by pipeline on machines with these cards, each given in GB of memory. `config`: the model's config.json on every node."""
    names = NAMES[: len(cards_gb)]
    nodes = {
        name: {"gpus": [{"model": "RTX 4090", "vram_gb": size} for size in cards]} for name, cards in zip(names, cards_gb, strict=True)
    }
    recipe = builders.recipe(
        model={"name": model}, method={"kind": "qlora", **tables.pop("method", {})}, parallel={"strategy": "pipeline", **tables.pop("parallel", {})},
        train={"global_batch": 12, "learning_rate": 1e-4, "steps": 10, **tables.pop("train", {})}, **tables,
    )  # fmt: skip
    facts = {} if config is None else {name: builders.facts(name, model={"found": True, "path": "/m", "config": config}) for name in names}
    inputs = builders.plan_inputs(builders.cluster(names, nodes=nodes), recipe, facts)
    return job.of(inputs, machines.choose(inputs), precision)


def refusal(job_: Job) -> InputError:
    with pytest.raises(InputError) as caught:
        registry.choose_strategy(job_)
    assert caught.value.message and caught.value.where and caught.value.hint
    return caught.value


def test_it_is_planned_where_nothing_is_wrong() -> None:
    ranks = registry.choose_strategy(job_of([[12], [8], [8]])).assignment.ranks
    assert sum(rank.stage.end - rank.stage.begin for rank in ranks if rank.stage) == 40 and all(
        rank.memory and rank.memory.fits for rank in ranks
    )


def test_embeddings_that_are_the_head_are_trained_on_both_ends() -> None:
    """Each holds the table with its gradient and optimizer, and they exchange the gradient in every step: 2048 x 49152 numbers each way."""
    model, method = "HuggingFaceTB/SmolLM2-1.7B", {"kind": "full"}
    full, adapters = (job_of([[80], [80], [80]], model=model, method=one) for one in (method, {"kind": "lora"}))
    chosen = registry.choose_strategy(full)
    assert "403 MB each way between the first and the last: embeddings that are the head, too, are on both" in chosen.choice.because
    assert "each way" not in registry.choose_strategy(adapters).choice.because
    scores = job_of([[80], [80]], model=model, method=method, objective={"kind": "reward"})
    assert "each way" not in registry.choose_strategy(scores).choice.because, "another head"
    table = 4 * 2048 * 49152
    assert isinstance(full, TrainingJob) and full.shape is not None and chosen.time is not None
    untied = dataclasses.replace(full, shape=dataclasses.replace(full.shape, tied_embeddings=False))
    sent, others = (chosen.strategy.step_bytes(one, 1) for one in (full, untied))
    assert sent is not None and others is not None and sent - others == 2 * table
    apart = chosen.strategy.seconds(untied, chosen.assignment.ranks)
    assert apart is not None and chosen.time.step_s - apart.step_s == pytest.approx(table / 117.6e6)
    assert chosen.time.wire_s - apart.wire_s == pytest.approx(table / 117.6e6)

    def held(one: TrainingJob) -> list[int]:
        items = [MicroBatching(one, 1).items(0, stage, 8, 1) for stage in range(3)]
        return [sum(item.size_bytes for item in each if item.name in ("base weights", "gradients", "optimizer")) for each in items]

    first, middle, last = held(full)
    assert held(untied) == [first, middle, last] and first - middle == pytest.approx(4 * table, rel=1e-3) == last - middle


def test_on_one_machine_the_table_goes_through_its_memory() -> None:
    full = job_of([[80, 80]], model="HuggingFaceTB/SmolLM2-1.7B", method={"kind": "full"})
    assert isinstance(full, TrainingJob) and MicroBatching(full, 1).table_s((0, 1)) == pytest.approx(4 * 2048 * 49152 / 5e9)


@pytest.mark.parametrize("method", [{"dropout": 0.1}, {"model_dropout": True}, {"kind": "full", "model_dropout": True}])
def test_dropout_is_no_reason_against_it(method: dict[str, Any]) -> None:
    """Each layer draws its own numbers, on whichever stage it is."""
    assert registry.choose_strategy(job_of([[240], [240]], method=method)).strategy.name == "pipeline"


@pytest.mark.parametrize(
    ("tables", "text", "hint"),
    [
        ({"parallel": {"compress": "bf16"}}, 'compress = "bf16" is a key of ddp', 'compress = "none"'),
        ({"parallel": {"bucket_mb": 5.0}}, "bucket_mb is a key of ddp", "leave bucket_mb out"),
        ({"parallel": {"shares": {"tower": 8, "laptop": 4}}}, "no shares of rows", 'shares = "auto"'),
        ({"parallel": {"shares": "equal"}}, "no shares of rows", 'shares = "auto"'),
        ({"method": {"kind": "lora", "backend": "unsloth"}}, "Unsloth's cannot be divided", 'backend = "transformers"'),
        (
            {"method": {"targets": ["embed_tokens", "lm_head"]}},
            "something to train on every stage, and embed_tokens and lm_head are at the ends",
            "q_proj",
        ),
        (
            {"method": {"targets": ["model.embed_tokens"]}},
            "something to train on every stage, and model.embed_tokens is at the ends",
            "q_proj",
        ),
        ({"method": {"targets": ["layers.3.self_attn.q_proj"]}}, "layers.3.self_attn.q_proj is only in some layers", "q_proj"),
        (
            {"method": {"targets": ["q_proj", "model.layers.1.mlp.up_proj", "2.mlp.down_proj"]}},
            "are only in some layers",
            'strategy = "ddp"',
        ),
        ({"model": "org/nobody-knows-it"}, "needs the shape of the model, which is not known here", "homelab setup RECIPE"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(tables: dict[str, Any], text: str, hint: str) -> None:
    error = refusal(job_of([[24], [24]], **tables))
    assert error.message.startswith('strategy = "pipeline" ') and text in error.message
    assert error.where == "recipe, [parallel] strategy" and hint in error.hint


def test_one_rank_is_no_pipeline() -> None:
    (alone,) = registry.choose_strategy(job_of([[80]])).assignment.ranks
    assert alone.stage is None and alone.share == 12, "the last one that is left goes on, where it has room"


def test_a_script_brings_its_own_way() -> None:
    inputs = builders.plan_inputs(builders.cluster(NAMES[:2]), builders.script_recipe(parallel={"strategy": "pipeline"}), {})
    error = refusal(job.of(inputs, machines.choose(inputs), "fp32"))
    assert "a [script] brings its own way to train" in error.message and error.hint == 'strategy = "auto"'


def test_more_ranks_than_layers_are_refused() -> None:
    error = refusal(job_of([[8], [8], [8]], config=builders.LLAMA | {"num_hidden_layers": 2}))
    assert "the model has 2, and there are 3 ranks" in error.message and error.hint == "leave nodes out with --nodes"


MIXTRAL = builders.LLAMA | {"model_type": "mixtral", "num_local_experts": 8}
QWEN3_MOE = builders.LLAMA | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 128}
ROUTER_LOSS = "its router has its own loss (output_router_logits in config.json), which is not a sum over tokens"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (MIXTRAL | {"output_router_logits": True}, "mixtral"),
        ({"model_type": "qwen2_moe", "num_experts": 60, "output_router_logits": True}, "qwen2_moe"),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 16, "output_router_logits": True}}, "llama4"),
    ],
)
def test_experts_whose_router_has_a_loss_are_refused_by_their_config(config: dict[str, Any], kind: str) -> None:
    error = refusal(job_of([[24], [24]], config=config))
    assert error.message == f'strategy = "pipeline" does not train this mixture of experts ({kind}): {ROUTER_LOSS}'
    assert "set output_router_logits to false" in error.hint and 'strategy = "auto"' in error.hint


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE], ids=["mixtral", "qwen3_moe"])
def test_a_mixture_of_equal_layers_is_cut(config: dict[str, Any]) -> None:
    stages = [rank.stage for rank in registry.choose_strategy(job_of([[24], [24]], config=config)).assignment.ranks]
    assert all(stage is not None and stage.end > stage.begin for stage in stages)


UNEQUAL: list[dict[str, Any]] = [{"mlp_only_layers": [0, 2]}, {"decoder_sparse_step": 2}]


@pytest.mark.parametrize("changes", UNEQUAL)
def test_a_layer_without_experts_counts_as_one_that_has_some(changes: dict[str, Any]) -> None:
    """Never less than it is: a cut of these has room for the model as it is."""
    mixed, equal = (job_of([[24], [24]], config=QWEN3_MOE | {"intermediate_size": 1024} | more) for more in (changes, {}))
    chosen = registry.choose_strategy(mixed).assignment
    assert [rank.memory for rank in chosen.ranks] == [rank.memory for rank in registry.choose_strategy(equal).assignment.ranks]
    (said,) = [choice for choice in chosen.choices if choice.subject == "layers without experts"]
    assert "counted as if they had experts" in said.because
    (mixed_shape, equal_shape) = (job_.shape for job_ in (mixed, equal) if isinstance(job_, job.TrainingJob))
    assert mixed_shape is not None and equal_shape is not None
    assert mixed_shape.total < equal_shape.total and mixed_shape.active_parameters <= equal_shape.active_parameters


@pytest.mark.parametrize("changes", UNEQUAL)
def test_wide_layers_without_experts_are_refused(changes: dict[str, Any]) -> None:
    error = refusal(job_of([[24], [24]], config=QWEN3_MOE | {"intermediate_size": 1025} | changes))
    assert "is planned for equal layers" in error.message and "have no experts and are wider" in error.message


HYBRID = "Qwen/Qwen3.5-27B"


def hybrid(cards_gb: list[list[float]], **tables: Any) -> Job:
    return job_of(cards_gb, model=HYBRID, config=known_models.config_of(HYBRID), **tables)


def test_a_model_of_two_kinds_of_layers_is_cut_as_one_of_the_larger_kind() -> None:
    chosen = registry.choose_strategy(hybrid([[12], [8], [8]])).assignment
    stages = [rank.stage for rank in chosen.ranks if rank.stage is not None]
    assert sorted(layer for stage in stages for layer in range(stage.begin, stage.end)) == list(range(64))
    assert all(rank.memory is not None and rank.memory.fits for rank in chosen.ranks)
    (said,) = [choice for choice in chosen.choices if choice.subject == "layers that attend"]
    assert said.value == "16" and "larger" in said.because


def test_a_config_with_a_part_for_images_is_planned_by_its_text() -> None:
    text = dict(known_models.config_of(HYBRID) or {})
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 27}}
    one, other = (registry.choose_strategy(job_of([[12], [8], [8]], config=config)).assignment for config in (text, whole))
    assert [(rank.stage, rank.memory) for rank in one.ranks] == [(rank.stage, rank.memory) for rank in other.ranks]


def test_files_in_few_bits_are_seen_behind_a_part_for_images() -> None:
    whole = {"model_type": "qwen3_5", "text_config": known_models.config_of(HYBRID), "quantization_config": {"quant_method": "fp8"}}
    shape = families.from_config(whole)
    assert shape is not None and shape.widened and not families.from_config({**whole, "quantization_config": None}).widened  # type: ignore[union-attr]


def test_a_model_that_is_trained_with_its_part_for_images_is_cut_without_it() -> None:
    name = "google/gemma-3-12b-it"
    config = known_models.config_of(name)
    cut = registry.choose_strategy(job_of([[8], [8]], model=name, config=config)).assignment.ranks
    assert sorted(layer for rank in cut if rank.stage for layer in range(rank.stage.begin, rank.stage.end)) == list(range(48))
    weights = sum(item.size_bytes for rank in cut if rank.memory for item in rank.memory.items if item.name == memory_items.BASE_WEIGHTS)
    text = families.known(name)
    assert text is not None and text.outside > 4e8
    packed = rank_memory.base_weight_bytes(dataclasses.replace(text, outside=0, tied_embeddings=False), Method(kind="qlora"), "bf16")
    assert weights == pytest.approx(packed, rel=0.02)
    error = refusal(job_of([[80], [80]], model=name, config=config, method={"kind": "full"}))
    assert "holds the language part alone of a model that sees" in error.message and 'kind = "lora"' in error.hint


def test_adapters_that_some_layers_lack_are_refused() -> None:
    """Three of four layers have no q_proj: a stage may have none at all."""
    error = refusal(hybrid([[24], [24]], method={"targets": ["q_proj", "v_proj"]}))
    assert "q_proj and v_proj are only in some layers" in error.message and "o_proj and out_proj" in error.hint
    for targets in (["o_proj", "out_proj"], ["down_proj"]):
        assert registry.choose_strategy(hybrid([[24], [24]], method={"targets": targets})).assignment.ranks[0].stage is not None


def test_a_small_gemma_is_refused_for_what_its_layers_need() -> None:
    text = {**(known_models.config_of("google/gemma-4-31B-it") or {}), "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20}
    error = refusal(job_of([[24], [24]], config={"model_type": "gemma4", "text_config": text}))
    assert "take nothing but what the one before gives" in error.message and 'strategy = "zero3"' in error.hint


def test_wide_layers_without_values_of_their_own_may_be_a_stage() -> None:
    """Gemma 4 takes keys for values there: it has no v_proj in one layer of six."""
    name = "google/gemma-4-31B-it"
    config = known_models.config_of(name) or {}
    error = refusal(job_of([[24], [24]], model=name, config=config, method={"targets": ["v_proj"]}))
    assert "v_proj is only in some layers" in error.message and "q_proj" in error.hint
    assert registry.choose_strategy(
        job_of([[24], [24]], model=name, config=config, method={"targets": ["q_proj", "v_proj"]})
    ).assignment.ranks
    small = config | {"global_head_dim": 64}
    assert "50 see a window of tokens and are larger" in refusal(job_of([[24], [24]], model=name, config=small)).message


def test_attention_that_is_larger_than_what_stands_in_its_place_is_refused() -> None:
    config = {**(known_models.config_of(HYBRID) or {}), "linear_num_value_heads": 16, "num_attention_heads": 48}
    error = refusal(job_of([[24], [24]], config=config))
    assert "is planned for equal layers: of the 64 of this model, 16 attend and are larger" in error.message


@pytest.mark.parametrize("is_quantised", [True, False])
def test_quantising_again_is_no_way_out(is_quantised: bool) -> None:
    """Files in MXFP4 are read as 16 bits: neither qlora nor an 8-bit base takes them."""
    config = {**(known_models.config_of("mistralai/Mixtral-8x7B-v0.1") or {}), "num_hidden_layers": 16}
    files = {"quantization_config": {"quant_method": "mxfp4"}} if is_quantised else {}
    error = refusal(job_of([[24], [24]], config=config | files, method={"kind": "lora"}))
    assert isinstance(error, DoesNotFit) and ("qlora" in str(error.hint)) is not is_quantised
    recipe = builders.recipe(
        method={"kind": "lora"}, parallel={"strategy": "pipeline"},
        train={"global_batch": 12, "learning_rate": 1e-4, "steps": 10, "seq_len": 1024},
    )  # fmt: skip
    edits = {edit.value for way in recipe_edits.fixes(recipe, error.scenario) for edit in way.edits}
    assert bool(edits & {"qlora", "8bit"}) is not is_quantised


def test_adapters_on_experts_are_not_counted() -> None:
    error = refusal(job_of([[24], [24]], config=MIXTRAL, method={"targets": ["q_proj", "w1", "w2", "w3"]}))
    assert "no formula counts adapters on routed experts" in error.message and 'targets = "all-linear"' in error.hint


def test_a_type_that_the_planner_does_not_know_is_named() -> None:
    error = refusal(job_of([[24], [24]], config={"model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 4}))
    assert "models of type gpt_neox are not known to the planner" in error.message and 'strategy = "zero3"' in error.hint


def test_a_card_without_room_for_one_layer_is_named_and_can_be_left_out() -> None:
    error = refusal(job_of([[24], [1], [24]]))
    assert isinstance(error, DoesNotFit)
    assert error.message == "not even one layer fits on laptop" and error.hint == "leave it out: --nodes tower,oldtower"
    nowhere = refusal(job_of([[1], [1]]))
    assert nowhere.message == "not even one layer fits on tower, laptop" and "--fit" in nowhere.hint


@pytest.mark.parametrize("strategy", ["auto", "pipeline"])
def test_a_node_without_room_for_a_layer_is_left_out_and_said(strategy: str) -> None:
    nodes = {name: {"gpus": [{"model": "RTX 4090", "vram_gb": size}]} for name, size in zip(NAMES, (8, 1, 8), strict=True)}
    recipe = builders.recipe(
        model={"name": LLAMA_2_13B}, method={"kind": "qlora"}, parallel={"strategy": strategy},
        train={"global_batch": 12, "learning_rate": 1e-4, "steps": 10, "seq_len": 1024},
    )  # fmt: skip
    plan = make(builders.plan_inputs(builders.cluster(NAMES, nodes=nodes), recipe, {}))
    assert plan.strategy == "pipeline" and [rank.node for rank in plan.ranks] == ["tower", "oldtower"] and "laptop" in plan.left_out
    assert [choice.because for choice in plan.choices if choice.subject == "node laptop"] == [
        "not even one layer of the model fits on laptop"
    ]
    assert "left out: not even one layer fits on laptop" in plan.warnings


def test_auto_cuts_exactly_where_a_card_is_too_small() -> None:
    def strategy(cards_gb: list[float]) -> str:
        return registry.choose_strategy(
            job_of([[size] for size in cards_gb], parallel={"strategy": "auto"}, train={"seq_len": 1024})
        ).strategy.name

    assert (strategy([16, 16, 16]), strategy([16, 8, 8])) == ("ddp", "pipeline")


def test_a_model_that_no_cut_fits_is_told_with_the_room_of_every_card() -> None:
    error = refusal(job_of([[40], [30]], method={"kind": "full"}))  # trained weights cannot lie on a host
    assert isinstance(error, DoesNotFit) and error.where == "recipe, [model] name"
    assert error.message.startswith("the 40 layers do not fit on these machines: there is room for tower ") and "laptop " in error.message
    assert "a shorter seq_len" in error.hint and "another machine" in error.hint
