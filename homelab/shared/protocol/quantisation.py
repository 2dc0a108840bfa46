"""How a frozen base model is held: which recipes quantise it, which checkpoints are quantised already, and the bytes of a quantised matrix.

    nf4    4 bits in blocks of 64, with double quantisation (Dettmers et al. 2023): half a byte, one 8-bit scale per block, one fp32 scale
           per 256 of those
    mxfp4  the routed experts of files that have them so (OCP Microscaling Formats): half a byte, one 8-bit exponent per block of 32
    int8   8 bits with one fp32 scale per row of the matrix (Dettmers et al. 2022, the weights of LLM.int8)

Quantised are all linear layers but the head, and in 4 bits the routed experts of a layer, each matrix of each alone
(`homelab.worker.model.quantised_experts`).
"""

from __future__ import annotations

from typing import NamedTuple

NF4, INT8, MXFP4 = "nf4", "int8", "mxfp4"
EXPERTS_KEY = "experts_in_4_bits"  # of a run.json; where it is missing, a base in 4 bits had its routed experts in 16
NF4_BLOCK, NF4_DOUBLE_BLOCK = 64, 256  # weights with one 8-bit scale, and such scales with one in fp32
NF4_BYTES = 0.5 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * NF4_DOUBLE_BLOCK)
MXFP4_BLOCK = 32  # weights with one 8-bit exponent
_SCALE_BYTES = 4
_AT_ONCE_BYTES = 64 * 2**20
_UNNAMED = "a method without a name"
# What becomes 16-bit weights, while it is loaded (`dequantize=True`) or, of experts in MXFP4, for each pass. Computing in the stored type is left to no
# node: one card has its kernels and another has not, so that the same recipe would be two trainings.
WIDENED = ("fp8", "mxfp8", MXFP4)


def of(kind: str | None, base: str | None) -> str | None:
    """NF4, INT8 or None (16 or 32 bits), of [method] kind and base."""
    if kind == "qlora":
        return NF4
    return INT8 if base == "8bit" else None


def experts_at_once(matrix_bytes: int, experts: int) -> int:
    """How many experts' matrices a pass makes of their 4 bits at once: few kernels for many small ones, and no more than one that is large."""
    return min(experts, max(1, _AT_ONCE_BYTES // matrix_bytes))


class Stored(NamedTuple):
    """A checkpoint whose weights are quantised already: transformers' name of the method, and how homelab holds such a base.

    `held`: NF4, INT8, or None for 16 bits. `is_known`: homelab trains adapters on it; any other method it can neither judge nor try.
    """

    method: str
    bits: int | None
    held: str | None = None
    is_known: bool = False

    @property
    def words(self) -> str:
        """ "GPTQ in 4 bits"."""
        name = self.method if self.method in ("bitsandbytes", "compressed-tensors", _UNNAMED) else self.method.upper()
        return f"{name} in {self.bits} bits" if self.bits else name


def stored_of(config: object) -> Stored | None:
    """What quantization_config of a config.json says; None where the weights are not quantised. Of a model with several parts, the text's counts."""
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    said = next(
        (
            part["quantization_config"]
            for part in (config, text)
            if isinstance(part, dict) and isinstance(part.get("quantization_config"), dict)
        ),
        None,
    )
    if said is None:
        return None
    if said.get("load_in_4bit") or said.get("_load_in_4bit"):
        return Stored("bitsandbytes", 4, NF4, True)
    if said.get("load_in_8bit") or said.get("_load_in_8bit"):
        return Stored("bitsandbytes", 8, INT8, True)
    named = said.get("quant_method")
    method = named[:40].lower() if isinstance(named, str) and named else _UNNAMED
    bits = said.get("bits", said.get("w_bit"))
    if method in WIDENED:
        return Stored(method, None, None, True)
    return Stored(method, bits if isinstance(bits, int) and 0 < bits < 33 else None)


def matrix_bytes(quantisation: str, rows: int, columns: int) -> float:
    """Bytes of a quantised weight of `rows` outputs and `columns` inputs."""
    if quantisation == NF4:
        return NF4_BYTES * rows * columns
    if quantisation == MXFP4:
        return (0.5 + 1 / MXFP4_BLOCK) * rows * columns
    assert quantisation == INT8
    return rows * columns + _SCALE_BYTES * rows
