"""What the benchmark of unequal machines trains: a random Llama, texts of equal and of very different length, and recipes."""

from __future__ import annotations

import json
import random
from pathlib import Path

SEQ_LEN = 512
GLOBAL_BATCH = 84
# Hugging Face's Trainer takes global_batch = ranks x rows per pass x accumulated passes: 3 x 4 x 5.
PASS_ROWS = 4
ROWS = 2520  # 30 whole steps: every step of a window holds a full batch
EQUAL_TOKENS = 64
MEDIAN_TOKENS, SIGMA = 48, 0.8  # of the log-normal lengths; their mean is 66
LORA = {"rank": 8, "alpha": 16}
LEARNING_RATE = 1e-3
SEED = 42
DATA = {"equal_length": "equal.jsonl", "varying_length": "varying.jsonl"}

_RECIPE = """
[model]
name = {model}
[data]
train = "{data}"
format = "text"
[method]
kind = "lora"
rank = {rank}
alpha = {alpha}
dropout = 0.0
[train]
global_batch = {global_batch}
steps = {steps}
learning_rate = {learning_rate}
warmup_steps = 0
schedule = "constant"
seq_len = {seq_len}
seed = {seed}
precision = "fp32"
gradient_checkpointing = false
[parallel]
shares = "{shares}"
[checkpoint]
every_steps = 1000000
[tracking]
tensorboard = false
"""


def make_model(folder: Path) -> Path:
    """A random Llama of 4.7 million parameters (hidden 256, 6 layers) whose tokens are bytes. About 23 ms of one core per row of 64."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    specials = ["<pad>", "<start>", "<end>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(specials + alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<start>", eos_token="<end>", model_max_length=SEQ_LEN
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ_LEN, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_data(folder: Path) -> None:
    """Both files, the same every time. A text of n - 1 letters is a row of n tokens: the worker appends the end token."""
    draw = random.Random(20)
    lengths = {
        "equal_length": [EQUAL_TOKENS] * ROWS,
        "varying_length": [min(SEQ_LEN, max(8, round(MEDIAN_TOKENS * draw.lognormvariate(0.0, SIGMA)))) for _ in range(ROWS)],
    }
    for kind, tokens in lengths.items():
        rows = ({"text": "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(count - 1))} for count in tokens)
        (folder / DATA[kind]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def count_tokens(model: Path, data: Path) -> list[int]:
    """Tokens of every row without any padding, counted here and not by what is measured: the text's, and the end token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in data.read_text(encoding="utf-8").splitlines()]
    return [min(SEQ_LEN, len(encoded.ids) + 1) for encoded in tokenizer.encode_batch(texts)]


def recipe(model: Path, kind: str, shares: str, steps: int) -> str:
    """The text of a recipe for the built-in worker. `kind` is a key of DATA."""
    return _RECIPE.format(
        model=json.dumps(str(model)), data=DATA[kind], shares=shares, steps=steps, global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN,
        learning_rate=LEARNING_RATE, seed=SEED, **LORA,
    )  # fmt: skip


def script_recipe(script: Path, *arguments: object) -> str:
    """The text of a recipe that starts a program of this folder."""
    return f"[script]\npath = {json.dumps(script.name)}\nargs = {json.dumps([str(argument) for argument in arguments])}\n"
