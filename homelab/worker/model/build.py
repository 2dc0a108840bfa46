"""The model that is trained: tokenizer, base weights, and the method (full, lora, qlora) on top."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch

from homelab.shared.protocol.quantisation import EXPERTS_KEY, INT8, NF4
from homelab.shared.recipe import Method
from homelab.worker.errors import WorkerError, size_words
from homelab.worker.model import adapted as adapted_parts
from homelab.worker.model import (
    adapter_targets,
    base_kind,
    fused_loss,
    grouped_queries,
    host_layers,
    inspection,
    kept_layers,
    layer_seeds,
    model_dropout,
    pair_loss,
    quantised_cache,
    score_head,
    stored_experts,
    stored_weights,
    trained_weights,
    weight_digests,
)
from homelab.worker.model.kept_layers import KeptLayers
from homelab.worker.model.pretrained import DTYPES, WHOLE, LoadedPart, from_pretrained
from homelab.worker.runtime.task import Task

Note = Callable[[str], None]
_MANY_TIMES = 10  # as many weights as adapters beside the experts have: then a note says so


def refuse_unfit(task: Task, path: str) -> None:
    """Raises WorkerError where the base model cannot be trained in the recipe's way, as far as its files tell before any weight is read."""
    config = base_kind.config_of(path, task.model.revision)
    stored_weights.refuse(stored_weights.of(config), task.method, path)


def load_model(task: Task, path: str, note: Note, part: LoadedPart = WHOLE) -> Any:
    """The model of this task, ready to train: trainable weights are fp32, frozen ones in the plan's precision, or quantised (NF4 for qlora, 8 bits where the recipe says so).

    Adapters start from the recipe's seed, so they are the same on every rank and for every number of ranks. `part`: what the strategy has here of it.
    """
    method, train = task.method, task.train
    note(f"precision: {task.precision}, on {task.device}{_slowness(task)}")
    if task.device == "cuda":
        grouped_queries.repeat_keys(task.precision, torch.cuda.get_device_capability())
    if method.backend == "unsloth":
        from homelab.worker.model import unsloth

        model = unsloth.load(task, path, note)
        model_dropout.settle(model, task, note, WHOLE)
        return _told(model, task, note)
    model = _load_base(task, path, note, part)
    model_dropout.settle(model, task, note, part)
    if train.gradient_checkpointing:
        enable_checkpointing(model)
    scores = task.objective is not None and task.objective.scores and part.has_loss
    if scores:
        score_head.put_on(model, train.seed, method.targets, note)
    elif train.fused_loss and part.has_loss:
        _fuse_loss(model, task, note)
    if task.objective is not None and part.has_loss:
        pair_loss.install(model, task.objective)
    if method.kind != "full":
        model = add_adapters(model, method, task.train.seed)
        if scores:
            score_head.train(model)
    trained_weights.freeze_unreached(model, note)
    return _told(model, task, note)


def _slowness(task: Task) -> str:
    """What a person should know of this precision on this processor, after a colon; or nothing. The questions to mkldnn are those that torch asks itself."""
    mkldnn = torch.ops.mkldnn
    # one product of matrices, measured
    known = {"bf16": (mkldnn._is_mkldnn_bf16_supported, 25), "fp16": (mkldnn._is_mkldnn_fp16_supported, 80)}
    if task.device != "cpu" or task.precision not in known:
        return ""
    has_instructions, times = known[task.precision]
    if has_instructions():
        return ""
    return f': this CPU has no instructions for it, and is up to {times} times faster with [train] precision = "fp32"'


def _told(model: Any, task: Task, note: Note) -> Any:
    """The model, after a note about the trained weights. Raises WorkerError where no weight is trained."""
    method = task.method
    layer_seeds.install(model, task)
    if method.kind != "full" and method.dropout > 0:
        remedy = "; [parallel] micro_batch = 1 makes them independent of the cluster"
        if task.device == "cuda":  # ATen/native/cuda/Dropout.cu: which number an element gets depends on the card's count of processors
            remedy = " and on the model of the card; dropout = 0 makes the curve independent of the cluster"
        note(f"dropout: random numbers depend on the rows of a micro-batch{remedy}")
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if trainable == 0:
        raise WorkerError("nothing is trainable", where="[method]", hint='set [method] targets = "all-linear"', needs_launch=True)
    base = ", 8-bit base" if method.quantisation == INT8 else ""
    note(f"method: {method.kind}{base}, {trainable} trainable parameters")
    if method.kind != "full":
        from homelab.worker.model import experts_adapter

        others = trainable - experts_adapter.weights(model)
        if trainable > _MANY_TIMES * others:
            note(f'method: that is {trainable / max(others, 1):.0f} times what targets = "{adapter_targets.ALL_LINEAR}" trains: {others}')
        for line in adapted_parts.notes(model):
            note(line)
    return model


def _fuse_loss(model: Any, task: Task, note: Note) -> None:
    """Use the loss in chunks of tokens. A model with another kind of loss keeps its own where the recipe leaves the choice open."""
    plain, switches = model.forward, task.switches
    try:
        fused_loss.check(model, fused_loss.install(model, labelled_only=switches.labelled_only, gradient_at_once=switches.gradient_at_once))
    except WorkerError as error:
        if task.train.fused_loss != "auto":
            raise
        model.forward, model.takes_labelled = plain, False
        note(f"loss: all logits at once, as {error.message}; [train] fused_loss = false makes the plan count them")
    else:
        note("loss: in chunks of tokens, without all logits at once")


def _load_base(task: Task, path: str, note: Note, part: LoadedPart = WHOLE) -> Any:
    how = stored_weights.wanted(task.method)
    dtype = torch.float32 if task.method.kind == "full" else DTYPES[task.precision]
    found = stored_weights.of(base_kind.config_of(path, task.model.revision))
    stored_weights.refuse(found, task.method, path)
    card = task.local_rank if task.device == "cuda" else None
    held = stored_weights.held(found, how)
    stays = held is not None or stored_weights.leaves_experts(found, how)
    if part.is_gathered and not stays:
        card = None  # the whole model may have no room on it: it is read into the host's memory, and each card gets its part
    if found is not None:
        note(f"base: its files are quantised already ({found.words}), and held {'as they are' if stays else 'in ' + task.precision}")
    if part.words:
        note(part.words)
    read = functools.partial(load_base, quantisation=how, dtype=dtype, card=card, where=f"node {task.node}")
    parts = kept_layers.PART if part.takes_kept else ""
    is_kept = how == NF4 and found is None and (part.reader is None or part.takes_kept)
    folder = quantised_cache.folder_of(task.run_dir, task.model, path, dtype, parts) if is_kept else None
    by = quantised_cache.device_of(card) if folder is not None else ""
    if part.reader is not None:
        kept = KeptLayers(folder, note, adds=part.is_stage or task.is_keeper) if folder else None
        model = read(path, task.model.revision, reader=functools.partial(part.reader, kept=kept) if kept else part.reader)
    elif (model := quantised_cache.load(folder, path, read, note, by)) is None:
        model = read(path, task.model.revision)
        if folder is not None:
            quantised_cache.keep(model, folder, task, note, by)
    streamed = host_layers.of(model)
    if streamed is not None and streamed.unpinned_bytes:
        size = size_words(streamed.unpinned_bytes)
        note(f"streamed: this system pins no more memory, so {size} of the layers lie in memory that is not pinned, and come slower")
    if held is not None:
        from homelab.worker.model import experts_loading

        if weight_digests.quantised_experts(model) and not task.run.get(EXPERTS_KEY):
            raise WorkerError(
                "this run began with the experts of its base in 16 bits, and this version holds them in 4: it would go on as another training",
                where=f"run {task.run_dir.name}",
                hint="launch the recipe again as a new run; or go on with the version of homelab that began it",
                needs_launch=True,
            )
        left = experts_loading.words_of_unquantised(model, held, task.precision, is_stored=found is not None)
        if left:
            note(left)
    # With a cache, transformers ignores the ends of packed samples (masking_utils._preprocess_mask_arguments).
    inspection.let_cache(model, False)
    return model


def load_base(
    path: str,
    revision: str | None,
    quantisation: str | None,
    dtype: Any,
    card: int | None,
    where: str,
    reader: Callable[..., Any] | None = None,
) -> Any:
    """The base model as it is trained on, and asked afterwards: quantised (`stored_weights.wanted`), or in `dtype` ("auto": as it is stored).

    `card` None: on the CPU. `where` is named when bitsandbytes is not installed. `reader` reads the files where it is not transformers' own. Raises
    WorkerError for what cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = base_kind.config_of(path, revision)
    stored = stored_weights.of(config)
    options: dict[str, Any] = {"revision": revision, "dtype": dtype, **stored_weights.options(stored, config)}
    leaves, quantisation = stored_weights.leaves_experts(stored, quantisation), stored_weights.held(stored, quantisation)
    stored_weights.refuse_quantising(config.model_type, quantisation)
    if quantisation is not None:
        if importlib.util.find_spec("bitsandbytes") is None:
            hint = 'pip install bitsandbytes in the node\'s environment, or set [method] kind = "lora" without base'
            raise WorkerError("a quantised base needs the package bitsandbytes", where=where, hint=hint)
        if stored is not None:
            pass  # the files say how
        elif quantisation == INT8:
            options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
        else:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
            )
    if card is not None:  # directly to the GPU: the host may have less memory than the model needs
        options["device_map"] = {"": card}
    elif quantisation is not None:
        options["device_map"] = {"": "cpu"}
    with _holding_experts(quantisation == NF4 and (stored is None or quantised_cache.is_stored(path)), leaves=leaves):
        if reader is None:
            options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model = base_kind.whole(from_pretrained(AutoModelForCausalLM, path, **options), path)
        else:
            model = reader(path, **options)
    stored_weights.widen(model, stored, dtype)
    if quantisation == INT8:
        from homelab.worker.model import int8_linear

        int8_linear.install(model)
    for part in model.modules():
        # bitsandbytes must not repack 4-bit weights for inference. On a CPU with AVX512-BF16 the first forward pass in eval mode repacks them for a
        # kernel that has no gradient, and every later backward pass silently stops there (bitsandbytes 0.50, Linear4bit.forward; measured).
        if quantisation == NF4 and card is None and hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
        # 4-bit layers compute in the plan's precision: files that are quantised already say one of their own.
        if isinstance(dtype, torch.dtype) and hasattr(part, "compute_dtype") and hasattr(part, "compute_type_is_set"):
            part.compute_dtype, part.compute_type_is_set = dtype, True
    return model


def _holding_experts(in_4_bits: bool, *, leaves: bool) -> contextlib.AbstractContextManager[None]:
    """Around a load that holds routed experts in 4 bits, too, or leaves them in MXFP4; files that bitsandbytes quantised are read as they are."""
    if leaves or not in_4_bits:
        return stored_experts.left() if leaves else contextlib.nullcontext()
    from homelab.worker.model import experts_loading

    return experts_loading.quantising()


def enable_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass. Non-reentrant: the reentrant kind breaks under DDP and with frozen inputs."""
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def add_adapters(model: Any, method: Method, seed: int) -> Any:
    """LoRA adapters on a base model, trainable in fp32, started from `seed`.

    Not `prepare_model_for_kbit_training`: it casts embeddings, head and norms to fp32 (2.1 GB more at 8B). Freezing is PEFT's own
    work, and non-reentrant checkpointing needs no gradient at the inputs.
    """
    with host_layers.shaped(model):
        adapted = _adapted(model, method)
    for parameter in adapted.parameters():
        assert not parameter.requires_grad or parameter.dtype == torch.float32, "PEFT keeps trainable adapters in fp32"
    trained_weights.start_adapters(adapted, seed)
    return adapted


def _adapted(model: Any, method: Method) -> Any:
    from peft import LoraConfig

    from homelab.worker.model import experts_adapter

    linear = adapter_targets.linear_modules(model)
    outside = inspection.outside_language(model)
    modules, parameters = adapter_targets.resolved(model, method.targets)
    config = LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        target_modules=modules,
        target_parameters=parameters,
        exclude_modules=rf"({'|'.join(map(re.escape, outside))})(\..*)?" if outside else None,
        bias="none",
        task_type="CAUSAL_LM",
    )
    own_names = adapter_targets.as_written() if isinstance(method.targets, str) else contextlib.nullcontext()
    try:
        with own_names:
            adapted = experts_adapter.put_on(model, config)
    except ValueError as error:
        raise adapter_targets.unfit(error, linear, method.dropout) from error
    adapted_parts.refuse_unmergeable(adapted)
    return adapted
