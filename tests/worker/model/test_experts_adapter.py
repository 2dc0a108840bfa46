"""`targets = "all-linear+experts"`: LoRA on the routed experts, computed expert by expert, in PEFT's files."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from homelab.shared.protocol import quantisation
from homelab.shared.recipe import Method
from homelab.worker.checkpoints import weights
from homelab.worker.errors import WorkerError
from homelab.worker.model import adapter_targets, build, experts_adapter, fused_experts, inspection, weight_digests
from homelab.worker.tools import adapter_delta, memory_dry_run, memory_tracker
from tests.worker import harness
from tests.worker.model.test_adapter_targets import FAMILIES
from tests.worker.model.test_quantised_experts import KINDS, TOKENS, apart, eager, in_4_bits, plain

pytestmark = pytest.mark.timeout(120)
WITH_EXPERTS = adapter_targets.WITH_EXPERTS
# PEFT alone takes the targets of these as other layers, which the model card says.
MOVED = ("deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe", "qwen3_next")
# (family, kind of method)
SOME = [("qwen3_moe", "lora"), ("mixtral", "qlora"), ("deepseek_v3", "qlora")]
CASES = [
    pytest.param(family, kind, marks=() if (family, kind) in SOME else pytest.mark.thorough)
    for family in KINDS
    for kind in ("lora", "qlora")
]


def method(kind: str, targets: Any = WITH_EXPERTS, dropout: float = 0.0) -> Method:
    return Method(kind, rank=3, alpha=6, targets=targets, dropout=dropout)  # type: ignore[arg-type]


class Trained:
    """A tiny model with adapters on its experts that do something; `base`: transformers' own with the same weights."""

    def __init__(self, family: str, kind: str, folder: Path, targets: Any = WITH_EXPERTS) -> None:
        original = plain(family, folder)
        held = in_4_bits(folder) if kind == "qlora" else build.load_base(str(folder), None, None, torch.float32, None, "here")
        self.base = eager(original, held)
        self.model = build.add_adapters(held, method(kind, targets), 1)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in trainable(self.model):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        self.model.eval()


def trainable(model: Any) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=TOKENS, use_cache=False).logits
    return found


def pefts_own(base: Any, folder: Path) -> Any:
    """The adapters of `folder` as PEFT computes them, on the layers that they are of."""
    from peft import PeftModel

    with adapter_targets.as_written(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(base, str(folder), is_trainable=True).eval()


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_what_is_trained_is_what_peft_computes_of_its_files(family: str, kind: str, tmp_path: Path) -> None:
    trained = Trained(family, kind, tmp_path / "base")
    trained.model.save_pretrained(tmp_path / "final")
    wanted = logits(trained.model)
    assert apart(logits(trained.base), wanted) > 0.05, "the adapters matter"

    theirs = pefts_own(copy.deepcopy(trained.base), tmp_path / "final")
    assert apart(logits(theirs), wanted) <= 2e-6

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}

    own, expected = gradients(trained.model), gradients(theirs)
    assert set(own) == set(expected) and any("experts" in name for name in own)
    assert max(apart(own[name], expected[name]) for name in own) <= 1e-5
    again = weights.load_adapter(copy.deepcopy(trained.base), tmp_path / "final")
    assert apart(logits(again), wanted) <= 1e-6


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_peft_alone_loads_it_where_the_card_does_not_say_otherwise(family: str, kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    trained = Trained(family, kind, tmp_path / "base")
    trained.model.save_pretrained(tmp_path / "final")
    is_moved = adapter_targets.is_moved_by_peft(trained.model)
    assert is_moved == (family in MOVED)
    if is_moved:
        with pytest.raises(RuntimeError, match="size mismatch"):
            PeftModel.from_pretrained(trained.base, str(tmp_path / "final"))
    else:
        alone = PeftModel.from_pretrained(trained.base, str(tmp_path / "final"))
        assert apart(logits(alone), logits(trained.model)) <= 2e-6


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_the_adapters_by_name_and_number(family: str, device: str) -> None:
    import transformers

    config, of_layer = FAMILIES[family]
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **config))
    experts = {name: part for name, part in model.named_modules() if fused_experts.fits(part)}
    adapted = build.add_adapters(model, method("lora"), 1)
    found = inspection.adapted(adapted)
    names = {name.partition(".*.")[2] for name in found}
    assert names == of_layer | {"mlp.experts"}
    assert found["model.layers.*.mlp.experts"] == len(experts)
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    assert experts_adapter.weights(adapted) == len(experts) * 4 * 3 * ((hidden + 2 * inner) + (inner + hidden))
    assert inspection.unreached(adapted) in (frozenset(), None), "every adapter is computed"
    assert not any("gate." in name or "router" in name for name, part in adapted.named_parameters() if part.requires_grad)


def test_a_list_that_reaches_experts_trains_them_in_4_bits_too(tmp_path: Path) -> None:
    """PEFT finds no parameters of that name there, and would put adapters on attention alone without a word."""
    trained = Trained("mixtral", "qlora", tmp_path / "base", ("q_proj", "w1", "w2", "w3"))
    assert experts_adapter.weights(trained.model) > 0
    trained.model.save_pretrained(tmp_path / "final")
    again = weights.load_adapter(trained.base, tmp_path / "final")
    assert apart(logits(again), logits(trained.model)) <= 1e-6


def test_no_product_of_all_experts_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's own adapters make B x A of every expert in each pass."""
    monkeypatch.setattr(quantisation, "experts_at_once", lambda *_: 1)  # matrices in 4 bits are made one by one, too
    model = Trained("mixtral", "qlora", tmp_path / "base").model
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for each in torch.utils._pytree.tree_leaves(result):
                if isinstance(each, torch.Tensor) and each.dim() == 3 and each.shape[0] == 4:
                    largest = max(largest, each.untyped_storage().nbytes())
            return result

    with Watch():
        model(input_ids=TOKENS, use_cache=False).logits.sum().backward()
    assert largest < 4 * 2 * 64 * 32 * 4, "gate_up of four experts, fp32"


@pytest.mark.parametrize(
    ("family", "hint"),
    [("llama", 'targets = "all-linear"'), ("gpt_oss", 'targets = "all-linear"'), ("llama4_text", 'targets = "all-linear"')],
)
def test_a_model_without_such_experts_is_refused_with_the_edit(family: str, hint: str, tmp_path: Path) -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **FAMILIES[family][0]))
    with pytest.raises(WorkerError, match="all-linear\\+experts") as refused:
        build.add_adapters(model, method("lora"), 1)
    assert hint in refused.value.hint and "targets" in refused.value.where and refused.value.needs_launch
    build.add_adapters(model, method("lora", "all-linear"), 1)  # the fix


def test_without_its_adapters_it_is_the_base(tmp_path: Path) -> None:
    """As pairs of answers need it (`reference_pass`)."""
    trained = Trained("qwen3_moe", "qlora", tmp_path / "base")
    with trained.model.disable_adapter():
        assert apart(logits(trained.model), logits(trained.base)) <= 1e-6


def test_dropout_is_refused_for_what_it_is(tmp_path: Path) -> None:
    plain("qwen3_moe", tmp_path)
    with pytest.raises(WorkerError) as refused:
        build.add_adapters(in_4_bits(tmp_path), method("qlora", dropout=0.1), 1)
    assert "dropout = 0" in refused.value.hint and "dropout" in refused.value.where


@pytest.mark.parametrize(("experts", "times"), [(4, 0), (64, 33)])
def test_the_numbers_are_said_where_experts_have_most_of_them(experts: int, times: int, tmp_path: Path) -> None:
    plain("qwen3_moe", tmp_path / "base", num_experts=experts)
    said: list[str] = []
    task = harness.task_of(
        tmp_path / "runs" / "one", model__name=str(tmp_path / "base"), method__kind="qlora", method__targets=WITH_EXPERTS, method__rank=2
    )
    model = build.load_model(task, str(tmp_path / "base"), said.append)
    total, of_experts = sum(each.numel() for each in trainable(model)), experts_adapter.weights(model)
    assert f"method: qlora, {total} trainable parameters" in said
    line = next((line for line in said if line.startswith("method: that is")), None)
    if times:
        assert total > 10 * (total - of_experts) and line is not None and f"{times} times" in line and str(total - of_experts) in line
    else:
        assert line is None and total < 10 * (total - of_experts)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next", "granitemoe", "olmoe"])
@pytest.mark.parametrize("targets", ["all-linear", WITH_EXPERTS])
def test_what_is_merged_answers_as_the_adapters_on_4_bits(family: str, targets: str, tmp_path: Path) -> None:
    trained = Trained(family, "qlora", tmp_path / "base", targets)
    wanted = logits(trained.model)
    changes = adapter_delta.changes(trained.model)
    held = [change for change in changes if change.held is not None]
    assert sum(change.kind == "the experts of a layer" for change in held) == 2 * len(weight_digests.quantised_experts(trained.model))
    merged = plain(family, tmp_path / "again")
    assert list(adapter_delta.put_into(merged, changes, dequantised=True)) == list(range(1, len(changes) + 1))
    assert float((logits(merged) - wanted).abs().max()) <= 2e-3


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_the_dry_run_of_adapters_on_experts_is_the_real_step(kind: str, tmp_path: Path) -> None:
    original = plain("mixtral", tmp_path / "base", hidden_size=128, intermediate_size=192, vocab_size=1000)
    how = {"kind": kind, "base": "auto", "rank": 4, "alpha": 4, "dropout": 0.0, "targets": WITH_EXPERTS, "backend": "auto"}
    train = {"seq_len": 200, "gradient_checkpointing": False, "fused_loss": False, "optimizer": "adamw", "seed": 1}
    sections: dict[str, dict[str, Any]] = {"model": {"name": str(tmp_path / "base")}, "method": how, "train": train}
    changes = {f"{section}__{key}": value for section, values in sections.items() for key, value in values.items()}
    task = harness.task_of(tmp_path / "runs" / "one", plan={"precision": "bf16"}, **changes)
    model = build.load_model(task, str(tmp_path / "base"), lambda text: None)
    tokens = torch.randint(0, 1000, (1, 200))

    def step(trained: list[Any], settings: Any, device: str) -> Any:
        optimizer = torch.optim.AdamW(trained, lr=0.0, foreach=False)
        optimizer.step()
        return optimizer

    real = memory_dry_run.follow(
        model, {"input_ids": tokens, "labels": tokens.clone()}, how, train, precision="bf16", device="cpu", optimizer=step
    )
    dry = memory_dry_run.dry_run(
        original.config.to_dict(), how, train, memory_dry_run.Situation("cpu", "bf16", micro_batch=1, masked=False)
    )
    assert dry["peak_bytes"] == pytest.approx(real.peak_bytes, rel=0.05), (dry, real.items)
    assert memory_tracker.Tracker.active is None
