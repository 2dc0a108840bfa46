"""The cards that the data sheets know (`homelab.controller.base.data_sheets`), by the many spellings of their names, and what follows from a name alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from homelab.controller.base.data_sheets import TABLE, WITH_ECC

_GIB = 2**30
INTEGRATED = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0), (12, 1)})
"""Parts without memory of their own, by compute capability: Jetson TX1 to Orin, Thor (10.1 before CUDA 13) and GB10."""
# Of the memory that the box says, nvidia-smi's total has: H100 81559 of 81920 MiB, RTX 5090 32607 of 32768, RTX 4090 24564 of 24576, 3090 all;
# with ECC in GDDR T4 15360 of 16384, L4 23034 and A10 23028 of 24576, L40S 46068 of 49152; GB10 121.7 of 128 GiB, the rest is the firmware's.
_OF_A_CARD, _WITH_ECC, _OF_A_SHARED_ONE = 0.995, 15 / 16, 0.95
# Doubled memory is sold (an RTX 2080 Ti with 22 GB), and halves (an RTX 3060 with 8): beyond that, somebody errs or the card lies.
_MOST, _LEAST = 2.1, 0.45


@dataclass(frozen=True)
class Card:
    """One kind of GPU. `architecture` is CUDA's "sm_86"; `peak_flops` is 16-bit, dense, 32-bit accumulation, per second."""

    name: str
    architecture: str
    memory_bytes: int
    peak_flops: float
    bandwidth_bytes_per_s: float
    laptop: bool = False

    def usable_bytes(self, nominal_bytes: int | None = None) -> int:
        """What of so much memory (default: the data sheet's) a program can have, as nvidia-smi's total answers it."""
        part = _OF_A_SHARED_ONE if self.compute_capability in INTEGRATED else _WITH_ECC if self.name in WITH_ECC else _OF_A_CARD
        return int((self.memory_bytes if nominal_bytes is None else nominal_bytes) * part)

    def can_have(self, memory_bytes: int) -> bool:
        """Whether a card of this name can have so much memory: whoever says another size errs, or the card lies."""
        return self.compute_capability in INTEGRATED or _LEAST <= memory_bytes / self.memory_bytes <= _MOST

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(8, 6) for sm_86."""
        return _capability(self.architecture)


def _capability(architecture: str) -> tuple[int, int]:
    digits = architecture.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])


# Words in a name that do not tell one card from another. "PCIe" and memory sizes do, for some; they are dropped last.
_NOISE = frozenset(
    [
        "nvidia",
        "geforce",
        "tesla",
        "quadro",
        "gpu",
        "graphics",
        "generation",
        "edition",
        "workstation",
        "founders",
        "with",
        "design",
        "card",
        "the",
        "oem",
        "hbm2",
        "hbm2e",
        "hbm3",
        "hbm3e",
        "sxm",
        "sxm2",
        "sxm3",
        "sxm4",
        "sxm5",
        "sxm6",
        "ac",
        "active",
        "jetson",
        "developer",
        "kit",
        "nvgpu",
    ]
)
# "RTX3070Ti", "4070Laptop", "6000Ada": where a person left out the space.
_JOINED = (re.compile(r"\b(rtx|gtx|titan)(?=a?\d)"), re.compile(r"(?<=\d)(ti|super|laptop|mobile|ada|sff|d)(?=\b|ti|super|laptop|mobile)"))
_MEMORY = re.compile(r"\b(\d+)\s*gi?b\b")


def _words(name: str) -> tuple[str, ...]:
    """The telling words of a card's name, in order, the memory size last ("80gb")."""
    text = re.sub(r"\(.*?\)", lambda found: f" {found.group()[1:-1]} ", name.lower().replace("®", " ").replace("™", " "))
    text = re.sub(r"dgx[\s_-]*spark", "gb10", re.sub(r"max[\s_-]?q", "maxq", text))
    text = re.sub(r"[^a-z0-9]+", " ", text)
    for pattern in _JOINED:
        text = pattern.sub(lambda found: f" {found.group()} ", text)
    memory = [f"{size}gb" for size in _MEMORY.findall(text)][:1]
    words = [{"mobile": "laptop"}.get(word, word) for word in _MEMORY.sub(" ", text).split() if word not in _NOISE]
    if "maxq" in words and "pro" not in words:
        # GeForce and Quadro "with Max-Q Design" are laptop parts; on the RTX PRO 6000 it names a desktop card of lower power.
        words = [word for word in words if word != "maxq"]
        words += [] if "laptop" in words else ["laptop"]
    return (*dict.fromkeys(words), *memory)


CARDS: tuple[Card, ...] = tuple(
    Card(name, architecture, round(memory_gib * _GIB), tflops * 1e12, gb_per_s * 1e9, name.endswith("Laptop"))
    for architecture, rows in TABLE.items()
    for name, memory_gib, tflops, gb_per_s in rows
)
_BY_WORDS: dict[frozenset[str], Card] = {frozenset(_words(card.name)): card for card in CARDS}
assert len(_BY_WORDS) == len(CARDS), "two cards of the table have the same words"


def lookup(name: str) -> Card | None:
    """The card of this name, as `nvidia-smi` or its owner writes it; None when the table does not know it.

    "NVIDIA GeForce RTX 3070 Ti", "rtx3070ti" and "3070 Ti" are one card; "RTX 3070 Ti Laptop GPU" is another one, never
    taken for the desktop card. Every telling word has to match: a near miss is unknown, not guessed. A memory size in the
    name ("Tesla V100-PCIE-32GB") goes before the table's.
    """
    words = _words(name)
    size = frozenset(word for word in words if word.endswith("gb"))
    plain = frozenset(words) - size
    variants = [plain | size, (plain - {"pcie"}) | size, plain, plain - {"pcie"}]
    for prefix in ((), ("rtx",), ("gtx",)):
        for variant in variants:
            card = _BY_WORDS.get(variant.union(prefix))
            if card is not None:
                # A size that is part of the table's name is what tells this card from another: "GH200 480GB" has 96 GB of its own.
                sizes = [int(word.removesuffix("gb")) * _GIB for word in size - variant]
                return replace(card, memory_bytes=sizes[0]) if sizes else card
    return None


# The generation of GeForce cards by the first digits of their number: an RTX 5055 that no table has is Blackwell.
_SERIES = {9: "sm_52", 10: "sm_61", 16: "sm_75", 20: "sm_75", 30: "sm_86", 40: "sm_89", 50: "sm_120"}
_GEFORCE = re.compile(r"^(?:rtx |gtx )?(\d{1,2})[1-9]\d(?: |$)")  # "rtx 4070", "gtx 980"; a workstation card's number ends in 00


def generation(name: str) -> tuple[int, int] | None:
    """The compute capability of the card of this name: by the table, else by the series of a GeForce number; a series above the table's counts as its last.

    None for a name that tells nothing: "new" is as good a guess as "old" for it.
    """
    card = lookup(name)
    if card is not None:
        return card.compute_capability
    found = _GEFORCE.search(" ".join(_words(name)))
    series = int(found[1]) if found else 0
    architecture = _SERIES.get(series) or (_SERIES[max(_SERIES)] if series > max(_SERIES) else None)
    return _capability(architecture) if architecture else None


def usable_bytes(name: str, believed_bytes: int) -> int:
    """What a program can have of a card that its owner describes, in bytes. Whoever wrote what nvidia-smi says has taken that off already."""
    card = lookup(name)
    if card is None:
        return int(believed_bytes * _OF_A_CARD)
    is_as_sold = abs(believed_bytes / card.memory_bytes - 1) < _ABOUT
    return min(believed_bytes, card.usable_bytes()) if is_as_sold else card.usable_bytes(believed_bytes)


_ABOUT = 0.1  # of the size that the box says: an "16 GB" T4 answers 15
