"""No row reaches a model that lacks its ids or its positions; what the model has is known without a weight."""

from __future__ import annotations

import shlex
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from homelab.worker.data.rows import Row
from homelab.worker.errors import WorkerError
from homelab.worker.model import row_limits

MOST = 20
_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": MOST,
}
_GPT: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MOST}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT, "gpt_bigcode": _GPT, "openai-gpt": _GPT, "ctrl": {**_GPT, "dff": 64}, "gptj": {**_GPT, "rotary_dim": 4}, "codegen": {**_GPT, "rotary_dim": 4},
    "opt": {**_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}, "biogpt": _SMALL,
    "gpt_neo": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]], "max_position_embeddings": MOST},
    "mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": MOST},
    "llama": _SMALL, "gpt_neox": _SMALL, "phi": _SMALL, "falcon": _SMALL, "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "xglm": {"vocab_size": 64, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": MOST},
}  # fmt: skip


def computes(model: Any, tokens: int) -> bool:
    try:
        model(input_ids=(torch.arange(tokens) % 64).unsqueeze(0))
    except (IndexError, RuntimeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_the_limits_are_those_at_which_the_model_really_breaks(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **KINDS[kind])
    with torch.device("meta"):
        limits = row_limits.of(transformers.AutoModelForCausalLM.from_config(config))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()

    assert limits == row_limits.of(model) and limits.ids == 64
    if limits.positions is None:
        assert computes(model, 3 * MOST)
    else:
        assert computes(model, limits.positions) and not computes(model, limits.positions + 1)


def row(*tokens: int, starts: tuple[int, ...] = (0,)) -> Row:
    return Row(array("i", tokens), b"\0" + b"\1" * (len(tokens) - 1), (7,), starts)


TOKENIZER: Any = SimpleNamespace(convert_ids_to_tokens=lambda number: f"<extra_{number}>", pad_token_id=64)


@pytest.mark.parametrize(
    ("rows", "seen"),
    [
        ([row(1, 2, 63)], None),
        ([row(1, 2), row(5, 64)], "'<extra_64>' (64), and the model's embedding has only the ids 0 to 63"),
        ([row(*range(1, 9))], None),
        ([row(*range(1, 10))], "a row has 9 tokens, and the model has 8 positions"),
        ([row(*range(1, 13), starts=(0, 5, 9))], None),  # packed: each sample counts from 0
        ([row(*range(1, 15), starts=(0, 5))], "a row has 9 tokens"),
    ],
)
def test_a_row_that_the_model_cannot_read_is_named(rows: list[Row], seen: str | None) -> None:
    limits = row_limits.RowLimits(ids=64, positions=8)
    if seen is None:
        row_limits.refuse(limits, rows, TOKENIZER, "tiny")
        return
    with pytest.raises(WorkerError) as refused:
        row_limits.refuse(limits, rows, TOKENIZER, "tiny")
    assert seen in refused.value.message and "data row 7" in refused.value.where and refused.value.hint


def test_a_rank_without_an_embedding_and_a_model_with_rotary_positions_take_any_row() -> None:
    row_limits.refuse(row_limits.RowLimits(None, None), [row(10**6, 1)], TOKENIZER, "tiny")


def test_padding_never_needs_a_row_of_its_own_in_the_embedding() -> None:
    assert row_limits.padding_id(TOKENIZER, 64) == 0
    assert row_limits.padding_id(TOKENIZER, 65) == 64
    assert row_limits.padding_id(SimpleNamespace(pad_token_id=None), 64) == 0


def test_a_folder_with_a_space_is_one_word_of_the_command() -> None:
    assert shlex.split(row_limits.widen_command("~/my models/a", "b c"))[3:] == [str(Path("~/my models/a").expanduser()), "b c"]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_that_widens_a_model_works(model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "narrow", tmp_path / "wide"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<tool>"])
    transformers.AutoModelForCausalLM.from_pretrained(model).save_pretrained(source)
    tokenizer.save_pretrained(source)

    command = shlex.split(row_limits.widen_command(str(source), str(target)))
    subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True)

    wide = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert row_limits.of(wide).ids == max(transformers.AutoTokenizer.from_pretrained(target).get_vocab().values()) + 1
