"""Joined rows are the padded ones: the same losses and gradients, whoever shares a pass; a model that cannot is left as it was."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from homelab.shared.recipe import Method
from homelab.worker.data import batches, encoding
from homelab.worker.data.rows import Row
from homelab.worker.model import fused_loss, packed_attention
from homelab.worker.model.build import add_adapters, enable_checkpointing
from homelab.worker.training.model_checks import check_samples_stay_apart
from tests.worker import harness

CPU, SMALL = torch.device("cpu"), {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 97, "initializer_range": 0.3,
}  # fmt: skip


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | changes))
    model.config.use_cache = False
    return model.train()


def rows(lengths: tuple[int, ...] = (21, 5, 13, 1), seed: int = 3) -> list[Row]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for index, length in enumerate(lengths):
        tokens = array("i", torch.randint(0, 97, (length,), generator=draw).tolist())
        found.append(Row(tokens, bytes([0] * min(length, 3) + [1] * (length - 3)), (index,)))
    return found


def passed(model: Any, batch: dict[str, Any], items: int = 20) -> tuple[float, dict[str, Any]]:
    """(loss, gradients) of one pass."""
    model.zero_grad()
    loss = model(**batch, num_items_in_batch=torch.tensor(items)).loss
    loss.backward()
    return float(loss.detach()), {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def assert_same(found: tuple[float, dict[str, Any]], wanted: tuple[float, dict[str, Any]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for name, gradient in wanted[1].items():
        assert float((found[1][name] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-9, name
    assert harness.whole_error(found[1], wanted[1]) <= 1e-6


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_joined_rows_lose_what_padded_rows_lose(packed: bool, fused: bool) -> None:
    model, some = llama(), rows()
    if fused:
        fused_loss.install(model, chunk=8)
    enable_checkpointing(model)
    model = add_adapters(model, Method("lora", rank=4, alpha=8), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    some = encoding.pack_rows(some, 26) if packed else some
    assert len(some) == (2 if packed else 4)
    wanted = passed(model, batches.Form(0).batch(some, packed=packed))
    assert packed_attention.use(model, CPU, torch.float32) is None and model.training
    assert_same(passed(model, batches.Form(0, joined=True, labelled=fused).batch(some, packed=packed)), wanted)
    apart = [passed(model, batches.join([row])) for row in some]
    assert sum(loss for loss, _ in apart) == pytest.approx(wanted[0], rel=1e-6)


@pytest.mark.parametrize("groups_heads", [True, False])
def test_the_one_kernel_is_asked_for_the_same(monkeypatch: pytest.MonkeyPatch, groups_heads: bool) -> None:
    """What varlen_attn documents in torch 2.12 and, without grouped heads, in 2.11, played with plain attention; the kernel needs a card."""
    asked: list[dict[str, Any]] = []

    def varlen(query: Any, key: Any, value: Any, ends: Any, key_ends: Any, longest: int, key_longest: int, **options: Any) -> Any:
        asked.append(options | {"longest": (longest, key_longest), "ends": (ends.tolist(), key_ends.tolist()), "dtype": ends.dtype})
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(tensor[start:end].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)),
                is_causal=True, scale=options["scale"], enable_gqa=options.get("enable_gqa", False),
            )[0].transpose(0, 1)
            for start, end in zip(ends.tolist()[:-1], ends.tolist()[1:], strict=True)
        ]  # fmt: skip
        assert query.shape[1:] == (4, 8) and key.shape[1:] == (2 if groups_heads else 4, 8)
        return torch.cat(parts)

    def varlen_since_2_12(*given: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool = False) -> Any:
        return varlen(*given, scale=scale, window_size=window_size, enable_gqa=enable_gqa)

    def varlen_of_2_11(*given: Any, scale: float, window_size: tuple[int, int]) -> Any:
        return varlen(*given, scale=scale, window_size=window_size)

    model = llama()
    assert packed_attention.use(model, CPU, torch.float32) is None
    wanted = passed(model, batches.join(rows()))
    assert not asked
    monkeypatch.setattr(packed_attention, "is_one_kernel", lambda query, value: True)
    monkeypatch.setattr(packed_attention, "_kernel", lambda: varlen_since_2_12 if groups_heads else varlen_of_2_11)
    assert_same(passed(model, batches.join(rows())), wanted)
    ends = [0, 21, 26, 39, 40]
    assert len(asked) == 2 and asked[0] == {
        "scale": pytest.approx(8**-0.5), "window_size": (-1, 0), "longest": (21, 21), "ends": (ends, ends), "dtype": torch.int32,
    } | ({"enable_gqa": True} if groups_heads else {})  # fmt: skip


def test_torch_has_the_kernel_that_is_asked_for() -> None:
    """Its parameters, in the order in which they are given."""
    import inspect

    kernel = packed_attention._kernel()
    assert kernel is not None
    names = list(inspect.signature(kernel).parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size", "enable_gqa"} <= set(names)


@pytest.fixture
def registered() -> Iterator[Any]:
    yield lambda function: transformers.AttentionInterface.register(packed_attention.NAME, function)
    transformers.AttentionInterface.register(packed_attention.NAME, packed_attention.forward)


def mixture() -> Any:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))
    model.config.use_cache = False
    return model.train()


@pytest.mark.parametrize("build", [llama, mixture])
def test_rows_that_see_each_other_are_noticed(registered: Any, build: Any) -> None:
    def leaking(*args: Any, segment_lengths: Any = None, segment_ends: Any = None, **kwargs: Any) -> Any:
        return packed_attention.forward(*args, **kwargs)

    registered(leaking)
    model = build()
    assert packed_attention.use(model, CPU, torch.float32) == "its rows see each other without padding"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_in_experts_is_no_sight_of_another_row(dtype: Any) -> None:
    """How many tokens an expert has decides in which order its products are added: a row's last bits depend on the rows beside it, padded or not."""
    model = mixture().to(dtype)
    check_samples_stay_apart(model, CPU)
    assert packed_attention.use(model, CPU, dtype) is None
    before = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    moved = torch.tensor([[1.5, 2.0], [3.0, 4.0 + 1e-6]])
    assert packed_attention.notices(llama(), before, moved, 1, 1e-4) and not packed_attention.notices(model, before, moved, 1, 1e-4)
    assert packed_attention.notices(model, before, torch.tensor([[1.5, 2.0], [3.0, float("nan")]]), 1, 1e-4)


def test_other_answers_are_noticed(registered: Any) -> None:
    def colder(*args: Any, scaling: float, **kwargs: Any) -> Any:
        return packed_attention.forward(*args, scaling=scaling * 0.9, **kwargs)

    registered(colder)
    assert "its answers differ" in str(packed_attention.use(llama(), CPU, torch.float32))


def test_models_with_another_attention_stay_as_they_are() -> None:
    mistral = transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=16))
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8))
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=97))
    eager = llama(attn_implementation="eager")
    for model, word in ((mistral, "sliding_window"), (gemma, "sliding_attention"), (bloom, ""), (eager, "eager")):
        before = model.config._attn_implementation
        assert word in (packed_attention.use(model, CPU, torch.float32) or "nothing"), type(model).__name__
        assert model.config._attn_implementation == before
    qwen = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, sliding_window=16, use_sliding_window=False))
    assert packed_attention.use(qwen, CPU, torch.float32) is None, "a window that is not used is none"


def test_autocast_reaches_the_attention() -> None:
    """In full training rotated queries are fp32 although values are in 16 bit; torch's own attention would cast them."""
    model = llama()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = passed(model, batches.collate(rows(), 0, packed=False))
        assert packed_attention.use(model, CPU, torch.bfloat16) is None
        found = passed(model, batches.join(rows()))
    assert found[0] == pytest.approx(wanted[0], rel=2e-3)


def test_a_step_is_copied_in_one_piece_for_each_kind_of_number() -> None:
    some = [batches.Form(0, joined=True, labelled=True).batch(part, packed=False) for part in (rows(), rows((4, 9)))]
    there = batches.copied(some, CPU, pin=False)
    for before, after in zip(some, there, strict=True):
        assert before.keys() == after.keys() and after["segment_lengths"] == before["segment_lengths"]
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]) if torch.is_tensor(tensor) else True, name
    kinds: dict[Any, set[int]] = {}
    for batch in there:
        for tensor in batch.values():
            if torch.is_tensor(tensor):
                kinds.setdefault(tensor.dtype, set()).add(tensor.untyped_storage().data_ptr())
    assert {dtype: len(storages) for dtype, storages in kinds.items()} == {torch.int64: 1, torch.int32: 1}


def test_every_sample_of_a_joined_row_begins_anew() -> None:
    """Rotary positions would not show it: only distances count there."""
    packed = Row(array("i", [5, 6, 7, 8, 9]), bytes([0, 1, 0, 1, 1]), (0, 1), (0, 2))
    joined = batches.join([packed, Row(array("i", [3, 4]), bytes([0, 1]), (2,))])
    assert joined["input_ids"].tolist() == [[5, 6, 7, 8, 9, 3, 4]]
    assert joined["labels"].tolist() == [[-100, 6, -100, 8, 9, -100, 4]]
    assert joined["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1]]
    assert joined["segment_lengths"] == (2, 3, 2) and joined["segment_ends"].tolist() == [0, 2, 5, 7]
    assert batches.labelled(joined["labels"]).tolist() == [0, 2, 3, 5] and batches.loss_tokens(joined) == 4


def test_rows_of_one_length_have_no_mask() -> None:
    assert "attention_mask" not in batches.collate(rows((7, 7)), 0, packed=False)
    assert batches.collate(rows((7, 6)), 0, packed=False)["attention_mask"].tolist() == [[1] * 7, [1] * 6 + [0]]


@pytest.mark.thorough
def test_the_switch_of_a_plan_pads_again(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    """Joined and padded, on unlike ranks: the same losses in every step, and less computed."""
    losses, said = {}, {}
    for joined in (True, False):
        run = harness.make_run(
            tmp_path / f"joined {joined}", model, data, train__fused_loss="auto", method__kind="lora", data__eval_fraction=0.1
        )
        forks.train(run, 1, [7, 5], micro_batch=3, switches={"joined_rows": joined})
        losses[joined] = harness.losses(run, 1)
        said[joined] = (run / "attempts" / "1" / "ranks" / "0" / "metrics.jsonl").read_text()
    assert losses[True] == pytest.approx(losses[False], rel=1e-5) and len(losses[True]) == 8
    assert losses[True][1] == pytest.approx(losses[False][1], rel=1e-6)


def test_who_could_join_rows_pads_where_another_rank_cannot() -> None:
    """Its attention makes no mask: packed samples would see each other, and the model would be blamed for it."""
    model, some = llama(), encoding.pack_rows(rows(), 26)
    wanted = passed(model, batches.Form(0).batch(some, packed=True))
    assert packed_attention.use(model, CPU, torch.float32) is None
    with pytest.raises(Exception, match="mixes packed samples"):
        check_samples_stay_apart(model, CPU)
    packed_attention.leave(model)
    check_samples_stay_apart(model, CPU)
    assert_same(passed(model, batches.Form(0).batch(some, packed=True)), wanted)
