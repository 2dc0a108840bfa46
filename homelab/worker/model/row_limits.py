"""What a row may hold for this model: ids that its embedding has, and no more tokens than it has absolute positions.

Beyond either, torch indexes out of range: an IndexError on a CPU, and on a card an assertion that takes the whole process with it.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from homelab.worker.errors import WorkerError
from homelab.worker.model import inspection

if TYPE_CHECKING:
    from homelab.worker.data.rows import Row

# Tables of absolute positions in transformers' models: GPT-2, GPT-BigCode, GPT-Neo (wpe), OPT, BioGPT, GPT-J, CodeGen (embed_positions),
# GPT (positions_embed), BERT's kind (position_embeddings).
_TABLE = re.compile(r"(^|\.)(wpe|embed_positions|positions_embed|position_embeddings|position_embedding)$")


class RowLimits(NamedTuple):
    """Rows of the token embedding (None: this rank has none), and the most tokens of a row (None: any)."""

    ids: int | None
    positions: int | None


def of(model: Any) -> RowLimits:
    """The limits of a model, real or on the meta device, with adapters or without."""
    ids = getattr(model.get_input_embeddings(), "num_embeddings", None)  # the stand-in of a pipeline's stage has none
    return RowLimits(ids, min(_positions(model), default=None))


def _positions(model: Any) -> Iterable[int]:
    towers = tuple(f"{place}." for place in inspection.outside_language(model))  # a text takes no place in a picture
    base = inspection.base_of(model)
    for name, part in base.named_modules():
        if name.startswith(towers):
            continue
        if isinstance(part, torch.nn.Embedding) and _TABLE.search(name) and not hasattr(part, "make_weights"):
            yield part.num_embeddings - int(getattr(part, "offset", 0))
    for name, buffer in base.named_buffers():
        if not name.startswith(towers) and _TABLE.search(name) and buffer.dim() == 2 and "sin" not in name:
            yield int(buffer.shape[0])
    for _, part in model.named_modules():
        if isinstance(table := getattr(part, "pos_encoding", None), torch.Tensor):  # CTRL
            yield int(table.shape[0])
    settings = model.config.get_text_config()
    if settings.model_type == "mpt":  # the bias of its attention is made for so many
        yield int(settings.max_seq_len)


def padding_id(tokenizer: Any, ids: int | None) -> int:
    """The id that fills a row up. No loss and no attention sees it, so one that the embedding lacks is replaced by any that it has."""
    wanted = tokenizer.pad_token_id or 0
    return wanted if ids is None or wanted < ids else 0


def refuse(limits: RowLimits, rows: Iterable[Row], tokenizer: Any, path: str) -> None:
    """Raises WorkerError for the first row that this model cannot read."""
    for row in rows:
        largest, longest = max(row.tokens), max(later - first for first, later in itertools.pairwise((*row.starts, len(row.tokens))))
        if limits.ids is not None and largest >= limits.ids:
            where = f"the row of data row {row.sources[0]}"
            raise beyond_embedding(limits.ids, {largest: str(tokenizer.convert_ids_to_tokens(largest))}, path, where)
        if limits.positions is not None and longest > limits.positions:
            raise beyond_positions(limits.positions, f"a row has {longest} tokens", f"data row {row.sources[0]}")


def beyond_positions(most: int, seen: str, where: str) -> WorkerError:
    """The error for rows that are longer than the model has positions."""
    return WorkerError(
        f"{seen}, and the model has {most} positions",
        where=where,
        hint=f"edit the recipe: [train] seq_len = {most} or less",
        needs_launch=True,
    )


def beyond_embedding(ids: int, tokens: dict[int, str], path: str, where: str) -> WorkerError:
    """The error for tokens (id: text) that the embedding has no row for."""
    named = ", ".join(f"{text!r} ({number})" for number, text in list(tokens.items())[:3])
    return WorkerError(
        f"the tokenizer makes {named}, and the model's embedding has only the ids 0 to {ids - 1}", where=where,
        hint=f"if it belongs to another model, copy the folder again; if tokens were added to it, enlarge the model into a new folder and name that one: {widen_command(path)}",
        needs_launch=True,
    )  # fmt: skip


def widen_command(path: str, target: str = "MODEL-WIDENED") -> str:
    """The command that gives a model an embedding for all tokens of its tokenizer."""
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; source, target = sys.argv[1:]; tokenizer = T.from_pretrained(source); "
        "model = M.from_pretrained(source, dtype='auto'); model.resize_token_embeddings(max(tokenizer.get_vocab().values()) + 1); "
        "model.save_pretrained(target); tokenizer.save_pretrained(target)"
    )
    return f'python -c "{code}" {shlex.quote(os.path.expanduser(path))} {shlex.quote(target)}'
