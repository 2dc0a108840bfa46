"""How a frozen base model is held: which recipes quantise it, and the bytes of a quantised matrix.

    nf4    4 bits in blocks of 64, with double quantisation (Dettmers et al. 2023): half a byte, one 8-bit scale per block, one fp32 scale
           per 256 of those
    int8   8 bits with one fp32 scale per row of the matrix (Dettmers et al. 2022, the weights of LLM.int8)

Quantised are all linear layers but the head.
"""

from __future__ import annotations

NF4, INT8 = "nf4", "int8"
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
_SCALE_BYTES = 4


def of(kind: str | None, base: str | None) -> str | None:
    """NF4, INT8 or None (16 or 32 bits), of [method] kind and base."""
    if kind == "qlora":
        return NF4
    return INT8 if base == "8bit" else None


def matrix_bytes(quantisation: str, rows: int, columns: int) -> float:
    """Bytes of a quantised weight of `rows` outputs and `columns` inputs."""
    if quantisation == NF4:
        return NF4_BYTES * rows * columns
    assert quantisation == INT8
    return rows * columns + _SCALE_BYTES * rows
