"""Routed experts in 4 bits: what they hold, what they compute, how they are loaded and kept."""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
bitsandbytes = pytest.importorskip("bitsandbytes")

from homelab.shared.protocol import quantisation
from homelab.worker.errors import WorkerError
from homelab.worker.model import build, experts_loading, fused_experts, quantised_experts, random_weights, weight_digests
from homelab.worker.model.fused_experts import MATRICES
from homelab.worker.model.quantised_experts import QuantisedExperts
from homelab.worker.tools import footprint, memory_dry_run
from tests.worker import harness
from tests.worker.model.test_adapter_targets import FAMILIES

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

# 36 x 11 weights are no whole number of blocks of 64, and 22 x 36 are neither.
RAGGED = ("qwen3_moe", {**FAMILIES["qwen3_moe"][0], "hidden_size": 36, "moe_intermediate_size": 11})
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, FAMILIES[kind][0]) for kind in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe",
       "hunyuan_v1_moe", "granitemoe", "granitemoeshared", "phimoe", "qwen3_next", "jamba")},
    "ragged": RAGGED,
}  # fmt: skip
STAYING = ("gpt_oss", "llama4_text")
TOKENS = torch.arange(1, 30).unsqueeze(0)


def plain(kind: str, folder: Path, **changes: Any) -> Any:
    """A tiny model of this kind with random weights; its files are in `folder`."""
    name, config = KINDS.get(kind) or (kind, FAMILIES[kind][0])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(name, **{**config, **changes}), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    model.set_experts_implementation("eager")
    return model


def in_4_bits(folder: Path, dtype: Any = torch.float32) -> Any:
    with weight_digests.noting_sources():
        return build.load_base(str(folder), None, quantisation.NF4, dtype, None, "here")


def eager(model: Any, held: Any) -> Any:
    """`model`, transformers' own with its "eager" experts, with what the 4 bits of `held` stand for."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, experts in weight_digests.quantised_experts(held).items():
            for matrix in MATRICES:
                getattr(modules[name], matrix).copy_(experts.matrices(matrix, range(experts.num_experts)))
        for name, layer in weight_digests.quantised(held).items():
            modules[name].weight.copy_(bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state))
    return model.eval()


def answer(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradient of their sum of squares at the embeddings."""
    given = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    logits = model.eval()(inputs_embeds=given, use_cache=False).logits
    logits.square().sum().backward()
    return logits.detach(), given.grad


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


SOME = ("qwen3_moe", "deepseek_v3", "ragged")


@pytest.mark.parametrize("kind", [kind if kind in SOME else pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS])
def test_experts_of_every_family_are_held_in_4_bits_and_compute_what_these_stand_for(kind: str, tmp_path: Path) -> None:
    original = plain(kind, tmp_path)
    fused = {name for name, part in original.named_modules() if fused_experts.is_fused(part)}
    held = in_4_bits(tmp_path)
    found = weight_digests.quantised_experts(held)
    assert set(found) == fused != set() and experts_loading.unquantised(held) == ("", 0, 0)
    for experts in found.values():
        assert not list(experts.parameters())
        assert {buffer.dtype for name, buffer in experts.named_buffers() if name.startswith(("codes", "scales"))} == {torch.uint8}
        size = sum(buffer.nbytes for buffer in experts.buffers())
        assert size == sum(experts.num_experts * expert_bytes(*experts.shapes[matrix]) for matrix in MATRICES)

    (logits, gradient), (wanted, wanted_gradient) = answer(held), answer(eager(copy.deepcopy(original), held))

    assert apart(logits, wanted) <= 1e-6 and apart(gradient, wanted_gradient) <= 1e-6
    assert apart(wanted, answer(original)[0]) > 1e-3, "4 bits are not the weights themselves"


def expert_bytes(rows: int, columns: int) -> int:
    blocks = math.ceil(rows * columns / 64)
    return 32 * blocks + blocks + 4 * math.ceil(blocks / 256) + 4


@pytest.mark.parametrize("fault", ["a token is dropped", "an expert is another"])
def test_the_comparison_sees_a_fault(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = plain("qwen3_moe", tmp_path)
    held = in_4_bits(tmp_path)
    own = fused_experts.routed

    def wrong(experts: Any, hidden: Any, index: Any, weights: Any, product: Any) -> Any:
        if fault == "a token is dropped":  # as a layer with a capacity does
            weights = weights * (torch.arange(len(weights)) != 7).unsqueeze(-1)
        else:
            index = torch.where(torch.arange(len(index)).unsqueeze(-1) == 7, (index + 1) % experts.num_experts, index)
        return own(experts, hidden, index, weights, product)

    monkeypatch.setattr(quantised_experts, "routed", wrong)
    (logits, gradient), (wanted, wanted_gradient) = answer(held), answer(eager(original, held))
    assert apart(logits, wanted) > 1e-4 and apart(gradient, wanted_gradient) > 1e-4


def test_a_formula_of_bytes_for_weights_of_a_real_size() -> None:
    """Qwen3-30B-A3B: 0.516 bytes a weight."""
    weights = 2 * 768 * 2048
    assert expert_bytes(2 * 768, 2048) == pytest.approx(quantisation.matrix_bytes(quantisation.NF4, 2 * 768, 2048), rel=1e-5)
    assert expert_bytes(2 * 768, 2048) / weights == pytest.approx(0.516, abs=1e-3)


def test_an_expert_is_quantised_as_a_layer_of_its_own(tmp_path: Path) -> None:
    """So it can be read alone: with its layer's others, its scales would be other ones."""
    original = plain("mixtral", tmp_path)
    experts = in_4_bits(tmp_path).model.layers[1].mlp.experts
    for number in range(4):
        weights = original.model.layers[1].mlp.experts.down_proj[number].detach()
        codes, state = bitsandbytes.functional.quantize_4bit(weights, blocksize=64, compress_statistics=True, quant_type="nf4")
        assert torch.equal(experts.matrices("down_proj", [number])[0], bitsandbytes.functional.dequantize_4bit(codes, state))
    whole = original.model.layers[1].mlp.experts.down_proj.detach()
    codes, state = bitsandbytes.functional.quantize_4bit(whole, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert not torch.equal(experts.matrices("down_proj", [1])[0], bitsandbytes.functional.dequantize_4bit(codes, state)[1])


# Weights of a matrix: whole blocks of blocks, whole blocks, and neither.
@pytest.mark.parametrize("shape", [(256, 128), (48, 32), (36, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_matrices_at_once_are_those_that_bitsandbytes_makes_of_each(dtype: Any, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_moe", **{**FAMILIES["qwen3_moe"][0], "num_experts": 9, "num_hidden_layers": 1})
    experts = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).model.layers[0].mlp.experts
    experts.down_proj = torch.nn.Parameter(torch.randn(9, *shape, dtype=dtype))
    weights = experts.down_proj.detach()
    held = QuantisedExperts(experts)
    held.hold("down_proj", weights)
    expected = []
    for matrix in weights:
        codes, state = bitsandbytes.functional.quantize_4bit(matrix, blocksize=64, compress_statistics=True, quant_type="nf4")
        expected.append(bitsandbytes.functional.dequantize_4bit(codes, state))
    for some in (range(9), [3], [3, 4, 5], [0, 2, 8], [7, 8]):
        made = held.matrices("down_proj", list(some))
        assert made.dtype == dtype and torch.equal(made, torch.stack([expected[number] for number in some]))
    assert not torch.equal(held.matrices("down_proj", [0, 2]), torch.stack(expected[:2]))


@pytest.mark.parametrize(("at_once", "dtype"), [(1, torch.float32), (3, torch.bfloat16), (99, torch.float32)])
def test_no_more_matrices_than_have_room_are_made_and_none_outlives_its_product(
    dtype: Any, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain("qwen3_moe", tmp_path)
    held = in_4_bits(tmp_path, dtype)
    made: list[Any] = []
    alive: list[int] = []
    sizes: list[int] = []
    own = QuantisedExperts.matrices

    def watched(self: Any, name: str, experts: Any) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in made))
        matrices = own(self, name, experts)
        made.append(weakref.ref(matrices.untyped_storage()))
        sizes.append(len(experts))
        assert matrices.dtype == dtype
        return matrices

    given = held.get_input_embeddings()(TOKENS).detach().requires_grad_()
    whole = held(inputs_embeds=given, use_cache=False).logits.detach()
    largest = max(math.prod(shape) for shape in held.model.layers[0].mlp.experts.shapes.values()) * dtype.itemsize
    monkeypatch.setattr(quantisation, "_AT_ONCE_BYTES", at_once * largest + 1)
    monkeypatch.setattr(QuantisedExperts, "matrices", watched)
    logits = held(inputs_embeds=given, use_cache=False).logits
    forward = len(made)
    logits.float().square().sum().backward()
    assert forward >= 2 * 2 and len(made) == 2 * forward, "once in either direction"
    assert set(alive) == {0} and min(4, at_once) in sizes and max(sizes) <= min(4, 2 * at_once), "down_proj is half as large"
    assert torch.equal(logits, whole), "however many are made at once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_of_several_experts_is_that_of_each(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one kernel that cards have from Ampere on, as torch computes it on a CPU."""
    torch.manual_seed(0)
    rows, matrices, gradient = torch.randn(37, 64, dtype=dtype), torch.randn(5, 48, 64, dtype=dtype), torch.randn(37, 48, dtype=dtype)
    each, parts = [10, 0, 7, 20, 0], (slice(0, 10), slice(10, 10), slice(10, 17), slice(17, 37), slice(37, 37))
    expected = torch.cat([rows[part] @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)])
    expected_back = torch.cat([gradient[part] @ matrix for part, matrix in zip(parts, matrices, strict=True)])
    for has in (False, True):
        monkeypatch.setattr(fused_experts, "_has_grouped_product", lambda *_, has=has: has)
        found, back = fused_experts.multiplied(rows, matrices, each), fused_experts.multiplied(gradient, matrices, each, is_back=True)
        assert apart(found.float(), expected.float()) <= 1e-6 and apart(back.float(), expected_back.float()) <= 1e-6
    other = fused_experts.multiplied(rows, matrices, [10, 7, 0, 20, 0])
    assert apart(other.float(), expected.float()) > 0.1


def test_a_tokens_experts_are_added_in_their_order_whichever_way_it_chose_them(tmp_path: Path) -> None:
    plain("qwen3_moe", tmp_path)
    experts = in_4_bits(tmp_path).model.layers[0].mlp.experts
    rows, chosen, weights = torch.randn(50, 32), torch.tensor([[0, 1, 2, 3]] * 50), torch.rand(50, 4)
    expected = experts(rows, chosen, weights)
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        assert torch.equal(experts(rows, chosen[:, order], weights[:, order]), expected)


def test_an_expert_that_no_token_chose_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain("qwen3_moe", tmp_path)
    held = in_4_bits(tmp_path)
    experts = held.model.layers[0].mlp.experts
    made: list[list[int]] = []
    own = QuantisedExperts.matrices
    monkeypatch.setattr(QuantisedExperts, "matrices", lambda self, name, some: made.append(list(some)) or own(self, name, some))
    rows, chosen = torch.randn(5, 32), torch.tensor([[3, 0]] * 5)
    found = experts(rows, chosen, torch.full((5, 2), 0.5))
    assert made == [[0, 3], [0, 3]]
    monkeypatch.undo()
    alone = [experts(rows, torch.full((5, 1), number), torch.full((5, 1), 0.5)) for number in (0, 3)]
    assert torch.equal(found, alone[0] + alone[1])


def test_they_are_made_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 16-bit experts of two layers never lie in memory together."""
    from transformers import core_model_loading

    plain("qwen3_moe", tmp_path, num_hidden_layers=6, moe_intermediate_size=24)
    read: list[Any] = []
    most = 0
    materialise, hold = core_model_loading._materialize_copy, QuantisedExperts.hold

    def watched(tensor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = materialise(tensor, *args, **kwargs)
        if made.shape in ((24, 32), (32, 24)):  # a matrix of one expert, as the files have it
            read.append(weakref.ref(made))
        return made

    def held(self: Any, name: str, weights: torch.Tensor, device: Any) -> None:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in read))
        assert weights.device == torch.device("cpu") and device == "cpu"
        hold(self, name, weights, device)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", watched)
    monkeypatch.setattr(QuantisedExperts, "hold", held)
    loaded = in_4_bits(tmp_path)
    assert len(read) == 6 * 4 * 3, "six layers of four experts with three matrices"
    assert most <= 4 * 2, "no more than one layer's gate and up"
    of_experts = [entry for entry in loaded._weight_conversions if isinstance(entry, core_model_loading.WeightConverter)]
    assert len(of_experts) == 2 and all(entry.force_cpu for entry in of_experts), "a card gets one matrix at a time"
    others = build.load_base(str(tmp_path), None, None, torch.float32, None, "here")._weight_conversions
    assert not any(getattr(entry, "force_cpu", False) for entry in others)


@pytest.mark.parametrize("kind", STAYING)
def test_a_form_that_stays_in_16_bits_is_named_with_its_size(kind: str, tmp_path: Path) -> None:
    plain(kind, tmp_path / "base")
    said: list[str] = []
    task = harness.task_of(tmp_path / "runs" / "one", plan={"precision": "bf16"}, model__name=str(tmp_path / "base"), method__kind="qlora")
    held = build._load_base(task, str(tmp_path / "base"), said.append)
    classes, layers, size = experts_loading.unquantised(held)
    assert layers and size == sum(
        weight.nbytes
        for name, weight in held.named_parameters()
        if ".experts." in name and weight.dtype == torch.bfloat16 and weight.dim() > 1
    )
    assert sum(f"the routed experts of {layers} layers stay in bf16" in line and classes in line for line in said) == 1, said


def test_a_run_that_began_with_experts_in_16_bits_does_not_go_on_with_4(tmp_path: Path) -> None:
    for kind, is_refused in (("qwen3_moe", True), ("gpt_oss", False)):
        plain(kind, tmp_path / kind)
        task = harness.task_of(tmp_path / "runs" / kind, model__name=str(tmp_path / kind), method__kind="qlora")
        del task.run[quantisation.EXPERTS_KEY]
        with pytest.raises(WorkerError, match="began with the experts of its base in 16 bits") if is_refused else contextlib.nullcontext():
            build._load_base(task, str(tmp_path / kind), lambda _: None)


def test_files_that_others_quantised_are_read_as_they_are(tmp_path: Path) -> None:
    """transformers alone leaves the experts in 16 bits, and so do its files."""
    plain("qwen3_moe", tmp_path / "base")
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=settings, device_map={"": "cpu"})
    theirs.save_pretrained(tmp_path / "stored")
    for part in theirs.modules():
        part.support_avx512bf16_for_cpu = False
    said: list[str] = []
    task = harness.task_of(tmp_path / "runs" / "one", model__name=str(tmp_path / "stored"), method__kind="qlora")
    held = build._load_base(task, str(tmp_path / "stored"), said.append)
    assert not weight_digests.quantised_experts(held) and any("stay in fp32" in line and "as the files have them" in line for line in said)
    with torch.no_grad():
        assert apart(held(input_ids=TOKENS).logits, theirs(input_ids=TOKENS).logits) <= 1e-6


def test_files_without_an_experts_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    plain("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "layers.1.mlp.experts" not in name or "down_proj" not in name}, file,
              metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(WorkerError, match=r"lack.*down_proj"):
        in_4_bits(tmp_path)


def test_digests_know_what_was_quantised_and_what_is_held(tmp_path: Path) -> None:
    plain("qwen3_moe", tmp_path / "base")
    one, other = in_4_bits(tmp_path / "base"), in_4_bits(tmp_path / "base")
    assert weight_digests.base(one) == weight_digests.base(other) and all(weight_digests.sources(one).values())
    read, held = weight_digests.base(one)
    part = one.model.layers[1].mlp.experts
    part.codes_down_proj[3, 5] ^= 1
    assert weight_digests.base(one)[0] == read and weight_digests.base(one)[1] != held, "as another card rounds"
    part.codes_down_proj[3, 5] ^= 1
    part.offset_gate_up_proj[2] += 1
    assert weight_digests.base(one)[0] == read and weight_digests.base(one)[1] != held
    original = plain("qwen3_moe", tmp_path / "base")
    with torch.no_grad():
        original.model.layers[0].mlp.experts.down_proj[1, 0, 0] += 1e-6
    original.save_pretrained(tmp_path / "other")
    assert weight_digests.base(in_4_bits(tmp_path / "other"))[0] != read, "another model, whatever its 4 bits are"


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        *(("qwen3_moe", damage) for damage in ("", "bit", "cut")),
        *(
            pytest.param(kind, damage, marks=() if kind == "deepseek_v3" else pytest.mark.thorough)
            for kind in KINDS
            for damage in ("", "bit")
        ),
    ],
)
def test_the_kept_base_gives_the_same_bits_and_a_damaged_one_is_made_anew(kind: str, damage: str, tmp_path: Path) -> None:
    plain(kind, tmp_path / "base")
    said: list[str] = []
    task = harness.task_of(tmp_path / "work" / "runs" / "one", model__name=str(tmp_path / "base"), method__kind="qlora")

    def load() -> Any:
        said.clear()
        with weight_digests.noting_sources():
            return build._load_base(task, str(tmp_path / "base"), said.append)

    first = load()
    assert "stored for the next start" in said[0]
    (kept,) = (tmp_path / "work" / "bases").glob("[!.]*")  # without its lock
    if damage:
        file = kept / "model.safetensors"
        content = bytearray(file.read_bytes())
        if damage == "cut":
            content = content[: len(content) // 2]
        else:
            place = content.index(bytes(next(iter(weight_digests.quantised_experts(first).values())).codes_down_proj[0].tolist()))
            content[place] ^= 4
        file.write_bytes(content)
    again = load()
    assert ("damaged" in said[0] and "stored for the next start" in said[1]) if damage else (len(said) == 1 and "read from" in said[0])
    assert weight_digests.base(first) == weight_digests.base(again) and weight_digests.sources(first) == weight_digests.sources(again)
    assert set(weight_digests.quantised_experts(again)) == set(weight_digests.quantised_experts(first)) != set()
    with torch.no_grad():
        assert torch.equal(first.eval()(input_ids=TOKENS).logits, again.eval()(input_ids=TOKENS).logits)
    shutil.rmtree(tmp_path / "work")


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_the_dry_run_holds_what_the_real_base_holds(kind: str, tmp_path: Path) -> None:
    original = plain(kind, tmp_path)
    held = in_4_bits(tmp_path, torch.bfloat16)
    really = sum(each.nbytes for part in held.modules() for each in stored(part))
    method = {"kind": "qlora", "base": "auto", "rank": 2, "alpha": 4, "dropout": 0.0, "targets": "all-linear", "backend": "auto"}
    train = {"seq_len": 8, "gradient_checkpointing": False, "fused_loss": False, "optimizer": "adamw", "seed": 1}
    situation = memory_dry_run.Situation("cpu", "bf16", micro_batch=1, masked=False)
    dry = memory_dry_run.dry_run(original.config.to_dict(), method, train, situation)
    assert dry["items"]["base weights"] == pytest.approx(really, rel=0.05)
    assert footprint.weight_bytes(original.bfloat16(), quantisation.NF4) == pytest.approx(really, rel=0.05), "as a chat looks for a place"


def test_random_weights_are_held_as_those_of_files(tmp_path: Path) -> None:
    """What measures a card has no files."""
    shape = plain("mixtral", tmp_path / "base").config.to_dict()
    path = str(random_weights.folder(tmp_path / "random", shape))
    held = build.load_base(path, None, quantisation.NF4, torch.float32, None, "here", random_weights.read)
    experts = weight_digests.quantised_experts(held)
    assert set(experts) == {f"model.layers.{number}.mlp.experts" for number in (0, 1)} and experts_loading.unquantised(held) == ("", 0, 0)
    assert all(float(part.matrices("down_proj", [3]).std()) > 0.01 for part in experts.values())


def stored(part: Any) -> Iterator[torch.Tensor]:
    """The tensors of one module, with the scales of a 4-bit layer."""
    for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
        yield tensor
        state = getattr(tensor, "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.state2.absmax)
