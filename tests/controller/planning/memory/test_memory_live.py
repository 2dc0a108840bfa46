"""The activation formulas against what a real Llama really holds: live storages followed through forward and backward."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.model.families import from_config
from homelab.shared.protocol.memory_items import ACTIVATIONS, CASTED_WEIGHTS, LOGITS, WORKING_SET
from homelab.shared.recipe import Method, Train

ROWS, LENGTH = 2, 256


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of every storage made inside, from its birth to its death."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf.untyped_storage())
        return result

    def see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def gone(_: object) -> None:
            self.known.pop(key, None)
            self.live_bytes -= size

        self.known[key] = weakref.ref(storage, gone)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def peak_of_a_step(config: Any, kind: str, precision: str, checkpointing: bool, targets: Any) -> int:
    """Bytes above weights and gradients at the peak of forward and backward, on the CPU."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    if kind == "lora":
        model = model.to(torch.bfloat16 if precision == "bf16" else torch.float32)
        modules = targets if targets == "all-linear" else list(targets)
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=modules, task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tracker = LiveStorages()
    kept = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            kept.append(parameter.grad.untyped_storage())
        kept.append(parameter.untyped_storage())
    kept += [buffer.untyped_storage() for buffer in model.buffers()]
    tracker.known = {storage._cdata: None for storage in kept}
    tokens = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
    mask = torch.ones_like(tokens)
    mask[0, -5:] = 0
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with tracker:
        with autocast:
            loss = model(input_ids=tokens, attention_mask=mask, labels=tokens, use_cache=False).loss
        loss.backward()
    return tracker.peak_bytes


ADAPTED_SOME = ("q_proj", "v_proj")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "precision", "checkpointing", "targets", "vocabulary"),
    [
        pytest.param("lora", "bf16", True, "all-linear", 64, marks=pytest.mark.thorough),
        ("lora", "bf16", True, "all-linear", 20_000),
        ("lora", "bf16", False, "all-linear", 64),
        pytest.param("lora", "bf16", False, ADAPTED_SOME, 64, marks=pytest.mark.thorough),
        ("lora", "fp32", True, "all-linear", 64),
        ("lora", "fp32", False, "all-linear", 20_000),
        pytest.param("lora", "fp32", False, ADAPTED_SOME, 64, marks=pytest.mark.thorough),
        pytest.param("full", "bf16", True, "all-linear", 64, marks=pytest.mark.thorough),
        ("full", "bf16", True, "all-linear", 4_000),
        pytest.param("full", "bf16", False, "all-linear", 64, marks=pytest.mark.thorough),
        pytest.param("full", "fp32", True, "all-linear", 64, marks=pytest.mark.thorough),
        ("full", "fp32", False, "all-linear", 20_000),
    ],
)
def test_activations_as_measured(kind: Any, precision: Any, checkpointing: bool, targets: Any, vocabulary: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        attn_implementation="sdpa",
    )
    architecture = from_config(config.to_dict())
    assert architecture is not None
    train = Train(global_batch=8, steps=1, learning_rate=1e-3, seq_len=LENGTH, gradient_checkpointing=checkpointing)
    items = rank_memory.estimate(architecture, Method(kind=kind, rank=8, targets=targets), train, RankSetup(precision, "cpu", ROWS))
    moving = (CASTED_WEIGHTS, ACTIVATIONS, WORKING_SET, LOGITS)
    estimated = sum(item.size_bytes for item in items if item.name in moving)
    real = peak_of_a_step(config, kind, precision, checkpointing, targets)
    print(f"{kind} {precision} checkpointing={checkpointing} {targets} estimated/real {estimated / real:.3f}")
    assert 0.93 <= estimated / real <= 1.20
