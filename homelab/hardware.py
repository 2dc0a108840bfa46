"""What the vendor's data sheets say of a card: architecture, memory, 16-bit tensor speed, memory bandwidth.

Sources: NVIDIA's data sheets and architecture whitepapers (Pascal, Volta, Turing, Ampere GA100 and GA10x, Ada, Hopper,
Blackwell). They are leads, not facts: used only for the first guess of who computes how much, until speeds are measured.

How a value was read:

- Speed is dense (no structured sparsity), 16-bit inputs with 32-bit accumulation, at the data sheet's boost clock. GeForce
  cards do that at half the headline tensor rate; workstation and data-centre cards at the full rate. Where a sheet gives
  only "AI TOPS" with sparsity it is divided down (RTX 50xx: FP4 sparse / 16; RTX 40xx: FP8 sparse / 8; RTX PRO Blackwell:
  FP4 sparse / 8; GB10: FP4 sparse / 8).
- Cards without tensor cores (GTX, P-series) have their 32-bit speed here: that is what a training step gets from them.
- A laptop part is another card than the desktop part of the same number. Its speed depends on the power limit its maker
  chose; the value is that of the highest one.
- Where one name was sold with several memory sizes and the name does not tell, the smaller one stands here. What a node
  says of its own card always goes before this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_GIB = 2**30


@dataclass(frozen=True)
class Card:
    """One kind of GPU. `architecture` is CUDA's "sm_86"; `peak_flops` is 16-bit, dense, 32-bit accumulation, per second."""

    name: str
    architecture: str
    memory_bytes: int
    peak_flops: float
    bandwidth_bytes_per_s: float
    laptop: bool = False

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(8, 6) for sm_86."""
        return _capability(self.architecture)



def _capability(architecture: str) -> tuple[int, int]:
    digits = architecture.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])


# name, memory in GiB, 16-bit dense TFLOPS with 32-bit accumulation, memory bandwidth in GB/s
_Row = tuple[str, float, float, float]

_TABLE: dict[str, tuple[_Row, ...]] = {
    "sm_60": (("P100", 16, 10.6, 732),),
    "sm_61": (
        ("GTX 1050", 2, 1.9, 112),
        ("GTX 1050 Ti", 4, 2.1, 112),
        ("GTX 1060", 6, 4.4, 192),
        ("GTX 1070", 8, 6.5, 256),
        ("GTX 1070 Ti", 8, 8.2, 256),
        ("GTX 1080", 8, 8.9, 320),
        ("GTX 1080 Ti", 11, 11.3, 484),
        ("TITAN Xp", 12, 12.1, 548),
        ("P4", 8, 5.5, 192),
        ("P40", 24, 11.8, 346),
    ),
    "sm_70": (("V100", 16, 125, 900), ("V100 PCIe", 16, 112, 900), ("TITAN V", 12, 110, 653)),
    "sm_75": (
        ("GTX 1650", 4, 3.0, 128),
        ("GTX 1650 Super", 4, 4.4, 192),
        ("GTX 1660", 6, 5.0, 192),
        ("GTX 1660 Super", 6, 5.0, 336),
        ("GTX 1660 Ti", 6, 5.4, 288),
        ("RTX 2060", 6, 25.8, 336),
        ("RTX 2060 Super", 8, 28.7, 448),
        ("RTX 2070", 8, 29.9, 448),
        ("RTX 2070 Super", 8, 36.3, 448),
        ("RTX 2080", 8, 40.3, 448),
        ("RTX 2080 Super", 8, 44.6, 496),
        ("RTX 2080 Ti", 11, 53.8, 616),
        ("RTX 2060 Laptop", 6, 24.0, 336),
        ("RTX 2070 Laptop", 8, 26.5, 448),
        ("RTX 2080 Laptop", 8, 37.4, 448),
        ("TITAN RTX", 24, 130.5, 672),
        ("RTX 4000", 8, 57.0, 416),
        ("RTX 5000", 16, 89.2, 448),
        ("RTX 6000", 24, 130.5, 672),
        ("RTX 8000", 48, 130.5, 672),
        ("T4", 16, 65, 320),
    ),
    "sm_80": (
        ("A30", 24, 165, 933),
        ("A100", 40, 312, 1555),
        ("A100 80GB", 80, 312, 2039),
        ("A100 80GB PCIe", 80, 312, 1935),
    ),
    "sm_86": (
        ("RTX 3050", 8, 18.2, 224),
        ("RTX 3060", 12, 25.5, 360),
        ("RTX 3060 Ti", 8, 32.4, 448),
        ("RTX 3070", 8, 40.6, 448),
        ("RTX 3070 Ti", 8, 43.5, 608),
        ("RTX 3080", 10, 59.5, 760),
        ("RTX 3080 12GB", 12, 61.3, 912),
        ("RTX 3080 Ti", 12, 68.2, 912),
        ("RTX 3090", 24, 71, 936),
        ("RTX 3090 Ti", 24, 80, 1008),
        ("RTX 3050 Laptop", 4, 14.3, 192),
        ("RTX 3050 Ti Laptop", 4, 17.4, 192),
        ("RTX 3060 Laptop", 6, 26.2, 336),
        ("RTX 3070 Laptop", 8, 33.2, 448),
        ("RTX 3070 Ti Laptop", 8, 35.0, 448),
        ("RTX 3080 Laptop", 8, 42.0, 448),
        ("RTX 3080 Ti Laptop", 16, 47.2, 512),
        ("RTX A2000", 6, 31.9, 288),
        ("RTX A2000 12GB", 12, 31.9, 288),
        ("RTX A4000", 16, 76.7, 448),
        ("RTX A4500", 20, 94.6, 640),
        ("RTX A5000", 24, 111.1, 768),
        ("RTX A5500", 24, 136.4, 768),
        ("RTX A6000", 48, 154.8, 768),
        ("A2", 16, 18, 200),
        ("A10", 24, 125, 600),
        ("A10G", 24, 70, 600),
        ("A40", 48, 149.7, 696),
    ),
    "sm_89": (
        ("RTX 4060", 8, 30.2, 272),
        ("RTX 4060 Ti", 8, 44.1, 288),
        ("RTX 4060 Ti 16GB", 16, 44.1, 288),
        ("RTX 4070", 12, 58.3, 504),
        ("RTX 4070 Super", 12, 71.0, 504),
        ("RTX 4070 Ti", 12, 80.2, 504),
        ("RTX 4070 Ti Super", 16, 88.2, 672),
        ("RTX 4080", 16, 97.5, 717),
        ("RTX 4080 Super", 16, 104.5, 736),
        ("RTX 4090", 24, 165.2, 1008),
        ("RTX 4050 Laptop", 6, 24.3, 192),
        ("RTX 4060 Laptop", 8, 29.1, 256),
        ("RTX 4070 Laptop", 8, 40.1, 256),
        ("RTX 4080 Laptop", 12, 67.8, 432),
        ("RTX 4090 Laptop", 16, 85.8, 576),
        ("RTX 2000 Ada", 16, 48, 224),
        ("RTX 4000 Ada", 20, 106.9, 360),
        ("RTX 4000 SFF Ada", 20, 76.7, 280),
        ("RTX 4500 Ada", 24, 158.5, 432),
        ("RTX 5000 Ada", 32, 261.1, 576),
        ("RTX 6000 Ada", 48, 364.2, 960),
        ("L4", 24, 121, 300),
        ("L40", 48, 181, 864),
        ("L40S", 48, 362, 864),
    ),
    "sm_90": (
        ("H100", 80, 989, 3350),
        ("H100 PCIe", 80, 756, 2039),
        ("H100 NVL", 94, 835, 3938),
        ("H200", 141, 989, 4800),
        ("H200 NVL", 141, 835, 4800),
        ("GH200", 96, 989, 4000),
    ),
    "sm_100": (("B200", 180, 2250, 8000),),
    "sm_120": (
        ("RTX 5050", 8, 26.3, 320),
        ("RTX 5060", 8, 38.4, 448),
        ("RTX 5060 Ti", 8, 47.4, 448),
        ("RTX 5060 Ti 16GB", 16, 47.4, 448),
        ("RTX 5070", 12, 61.7, 672),
        ("RTX 5070 Ti", 16, 87.9, 896),
        ("RTX 5080", 16, 112.6, 960),
        ("RTX 5090", 32, 209.5, 1792),
        ("RTX 5050 Laptop", 8, 27.5, 384),
        ("RTX 5060 Laptop", 8, 35.8, 384),
        ("RTX 5070 Laptop", 8, 49.9, 384),
        ("RTX 5070 Ti Laptop", 12, 62.0, 672),
        ("RTX 5080 Laptop", 16, 83.4, 896),
        ("RTX 5090 Laptop", 24, 114.0, 896),
        ("RTX PRO 4000 Blackwell", 24, 147, 672),
        ("RTX PRO 4500 Blackwell", 32, 210, 896),
        ("RTX PRO 5000 Blackwell", 48, 258, 1344),
        ("RTX PRO 6000 Blackwell", 96, 503.8, 1792),
        ("RTX PRO 6000 Blackwell Max-Q", 96, 438.9, 1792),
        ("RTX PRO 6000 Blackwell Server", 96, 503.8, 1597),
    ),
    "sm_121": (("GB10", 128, 125, 273),),
}

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
    ]
)
# "RTX3070Ti", "4070Laptop", "6000Ada": where a person left out the space.
_JOINED = (
    re.compile(r"\b(rtx|gtx|titan)(?=a?\d)"),
    re.compile(r"(?<=\d)(ti|super|laptop|mobile|ada|sff)(?=\b|ti|super|laptop|mobile)"),
)
_MEMORY = re.compile(r"\b(\d+)\s*gi?b\b")


def _words(name: str) -> tuple[str, ...]:
    """The telling words of a card's name, in order, the memory size last ("80gb")."""
    text = re.sub(
        r"\(.*?\)", lambda found: f" {found.group()[1:-1]} ", name.lower().replace("®", " ").replace("™", " ")
    )
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
    for architecture, rows in _TABLE.items()
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
                sizes = [int(word.removesuffix("gb")) * _GIB for word in size]
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
