"""The fused loss is the model's own loss: the same number and the same gradients, without all logits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from homelab.shared.recipe import Method
from homelab.worker.errors import WorkerError
from homelab.worker.model import fused_loss
from homelab.worker.model.build import add_adapters, enable_checkpointing
from homelab.worker.training.model_checks import check_loss_is_a_sum, check_samples_stay_apart
from tests.worker.model import tiny_models

VOCABULARY, ROWS, LENGTH = 97, 3, 21


def tiny(kind: str, tied: bool, targets: Any = "all-linear", *, fused: bool, checkpointing: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.config.use_cache = False
    if checkpointing:
        enable_checkpointing(model)
    if fused:
        fused_loss.install(model, chunk=8)  # 63 tokens: seven chunks and a rest
    if kind == "lora":
        model = add_adapters(model, Method("lora", rank=4, alpha=8, targets=targets), seed=1)
        for name, parameter in model.named_parameters():  # PEFT's B starts as zeros, and A would have no gradient
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 13:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def loss_and_gradients(model: Any, items: Any) -> tuple[float, dict[str, Any]]:
    output = model(**batch(), **({} if items is None else {"num_items_in_batch": items}))
    output.loss.backward()
    return float(output.loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def widest_result() -> Iterator[list[int]]:
    """The most elements of any tensor with the vocabulary as its last dimension that is made inside."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    seen = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2 or leaf.shape[-2] == 32:  # the head's own weight, seen sideways
                    continue
                if leaf.shape[-1] == VOCABULARY:
                    seen[0] = max(seen[0], leaf.numel())
            return result

    with Watch():
        yield seen


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize(("kind", "targets"), [("full", "all-linear"), ("lora", "all-linear"), ("lora", ["q_proj", "lm_head"])])
@pytest.mark.parametrize("items", [None, 7, torch.tensor(123)], ids=["mean", "int", "tensor"])
def test_the_same_loss_and_the_same_gradients(kind: str, targets: Any, tied: bool, items: Any) -> None:
    plain_loss, plain = loss_and_gradients(tiny(kind, tied, targets, fused=False), items)
    loss, gradients = loss_and_gradients(tiny(kind, tied, targets, fused=True), items)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert gradients.keys() == plain.keys() and len(plain) >= 4
    for name, wanted in plain.items():
        assert float((gradients[name] - wanted).norm()) <= 1e-6 * float(wanted.norm()), name
    if kind == "lora":
        assert all("lora_" in name for name in gradients), "the head itself is not trained"


def test_the_same_with_checkpointing_and_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain_loss, plain = loss_and_gradients(tiny("full", False, fused=False, checkpointing=True), 50)
        loss, gradients = loss_and_gradients(tiny("full", False, fused=True, checkpointing=True), 50)
    assert loss == pytest.approx(plain_loss, rel=1e-3)
    for name, wanted in plain.items():
        assert float((gradients[name] - wanted).norm()) <= 1e-2 * float(wanted.norm()), name


def test_never_all_logits() -> None:
    with widest_result() as seen:
        loss_and_gradients(tiny("lora", False, fused=False), 9)
    assert seen[0] >= ROWS * LENGTH * VOCABULARY
    with widest_result() as seen:
        loss_and_gradients(tiny("lora", False, fused=True), 9)
        with torch.no_grad():
            tiny("lora", False, fused=True).eval()(**batch(), num_items_in_batch=1)
    assert 0 < seen[0] <= 8 * VOCABULARY


def test_a_frozen_head_is_multiplied_with_twice_and_only_for_labels() -> None:
    """Its logits and the gradient of the hidden states; a third product would be the logits again."""

    def products(**switches: bool) -> list[int]:
        """Tokens of every product with the head."""
        from torch.utils._python_dispatch import TorchDispatchMode

        model = tiny("lora", False, fused=False)
        base = model.get_base_model()
        fused_loss.install(base, chunk=64, **switches)
        seen = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if "mm" in str(function) and any(VOCABULARY in argument.shape for argument in args[-2:]):
                    seen.append(args[-2].shape[0])
                return function(*args, **(kwargs or {}))

        with Watch():
            loss_and_gradients(model, 9)
        return seen

    with_labels = int((batch()["labels"][:, 1:] != -100).sum())
    assert 0 < with_labels < ROWS * LENGTH - ROWS
    assert products() == [with_labels] * 2
    assert products(gradient_at_once=False) == [with_labels] * 3
    assert products(labelled_only=False) == [ROWS * LENGTH] * 2


def test_small_gradients_survive_fp16() -> None:
    """A model that is nearly sure, with weights of the usual size: unscaled, what is left would be near the smallest number of fp16."""
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 5000, bias=False).requires_grad_(False)
    head.weight.copy_(0.02 * torch.nn.functional.normalize(torch.randn(5000, 64), dim=1))
    head = head.half()

    class Model:
        config = transformers.LlamaConfig()
        get_output_embeddings = staticmethod(lambda: head)

    targets = torch.arange(6)
    hidden = (16 / 0.02**2 * head.weight[targets]).requires_grad_()
    scale = 2.0**14
    (fused_loss.summed_loss(Model, hidden, targets, 4) * scale).backward()
    of_logits = torch.softmax(head(hidden).detach().double(), 1) - torch.nn.functional.one_hot(targets, 5000)
    exact = scale * of_logits @ head.weight.double()
    error = float((hidden.grad.double() - exact).norm() / exact.norm())
    assert error < 1e-3, f"{error:.1e}"  # 4e-4; 2.5e-3 unscaled


def test_where_the_recipe_leaves_it_open_a_loss_of_another_kind_stays() -> None:
    from types import SimpleNamespace

    from homelab.worker.model.build import _fuse_loss
    from homelab.worker.runtime.switches import Switches

    granite = transformers.GraniteForCausalLM(
        transformers.GraniteConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=VOCABULARY, logits_scaling=8.0,
            initializer_range=0.5,
        )
    )  # fmt: skip
    tokens, said = batch()["input_ids"], []
    wanted = float(granite(input_ids=tokens, labels=tokens).loss)
    for asked in ("auto", True):
        task: Any = SimpleNamespace(switches=Switches(), train=SimpleNamespace(fused_loss=asked))
        if asked is True:
            with pytest.raises(WorkerError, match="its own kind of loss"):
                _fuse_loss(granite, task, said.append)
        else:
            _fuse_loss(granite, task, said.append)
            assert float(granite(input_ids=tokens, labels=tokens).loss) == wanted
            assert not fused_loss.takes_labelled(granite)
    assert len(said) == 1 and "fused_loss = false" in said[0]


def test_the_workers_own_checks_pass() -> None:
    for kind in ("full", "lora"):
        model = tiny(kind, True, fused=True)
        check_loss_is_a_sum(model, torch.device("cpu"))
        check_samples_stay_apart(model, torch.device("cpu"))
        assert model(input_ids=batch()["input_ids"]).logits.shape == (ROWS, LENGTH, VOCABULARY)


def test_accelerate_may_wrap_and_unwrap_it() -> None:
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    for kind in ("full", "lora"):
        wanted = loss_and_gradients(tiny(kind, False, fused=False), 9)[0]
        model = accelerator.prepare_model(tiny(kind, False, fused=True))
        assert loss_and_gradients(model, 9)[0] == pytest.approx(wanted, rel=0.02)
        bare = extract_model_from_parallel(model, keep_fp32_wrapper=False)
        assert loss_and_gradients(bare, 9)[0] == pytest.approx(wanted, rel=1e-5)
        assert bare(**batch()).logits is None, "still fused"


def test_a_softcap_is_kept_and_an_unknown_loss_is_refused() -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    gemma = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**small, vocab_size=VOCABULARY, head_dim=8, final_logit_softcapping=0.5, initializer_range=0.5)
    )
    fused_loss.check(gemma, fused_loss.install(gemma, chunk=3))
    granite = transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**small, vocab_size=VOCABULARY, logits_scaling=8.0, initializer_range=0.5)
    )
    with pytest.raises(WorkerError, match="its own kind of loss") as caught:
        fused_loss.check(granite, fused_loss.install(granite, chunk=3))
    assert "fused_loss" in caught.value.where and "false" in caught.value.hint


def test_a_rank_without_any_label_has_a_loss_and_a_gradient_of_zero() -> None:
    model = tiny("lora", False, fused=True)
    tokens = torch.ones((1, 2), dtype=torch.long)
    output = model(input_ids=tokens, labels=torch.full_like(tokens, -100), num_items_in_batch=11)
    output.loss.backward()
    assert float(output.loss) == 0
    assert all(not p.grad.any() for p in model.parameters() if p.requires_grad)


SCALES = {"cohere": ("logit_scale", 0.0625), "granite": ("logits_scaling", 8.0), "falcon_h1": ("lm_head_multiplier", 2.0)}


@pytest.mark.parametrize("kind", ["cohere", "granite"])
@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_scales_its_logits_is_seen_by_its_config(kind: str, seed: int) -> None:
    model = tiny_models.build(kind, initializer_range=0.002 * (seed + 1))
    key, value = SCALES[kind]

    assert fused_loss.scale_of(model) == f"{key} = {value:g}"
    with pytest.raises(WorkerError, match=key):
        fused_loss.check(model, fused_loss.install(model))


@pytest.mark.parametrize("scale", [0.8, 0.97, 1.03, 1.25, 4.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_scale_that_no_key_names_is_seen_for_any_weights(scale: float, seed: int) -> None:
    """The logits of a random model are near zero: its loss is that of a guess, whatever the scale."""
    torch.manual_seed(seed)
    model = tiny_models.build("llama", initializer_range=0.005)
    torch.nn.init.normal_(model.lm_head.weight, std=0.005, generator=torch.Generator().manual_seed(seed))
    plain = type(model).forward

    def forward(self: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * scale
        output.loss = None if labels is None else torch.nn.functional.cross_entropy(output.logits[0, :-1], labels[0, 1:])
        return output

    original = fused_loss.install(model)
    assert callable(original)
    with pytest.raises(WorkerError, match="own kind"):
        fused_loss.check(model, functools.partial(forward, model))
    fused_loss.check(model, original)


@pytest.mark.parametrize("kind", sorted({*tiny_models.CONFIGS} - set(SCALES) - {"opt"}))
def test_models_without_a_scale_take_the_fused_loss(kind: str) -> None:
    model = tiny_models.build(kind)
    fused_loss.check(model, fused_loss.install(model, chunk=3))
