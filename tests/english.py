"""The sentences of a Markdown page, and which of them are hard to read. `python -m tests.english` lists those of all pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import homelab

REPOSITORY = Path(homelab.__file__).parents[1]
DOCS = REPOSITORY / "homelab" / "docs"
PAGES = (REPOSITORY / "README.md", *sorted(DOCS.glob("*.md")))
FOR_CONTRIBUTORS = (REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "homelab" / "README.md")
README_WORDS = 1000
MOST_WORDS = 30
MEAN_WORDS = 20
# A subject that the reader must look for: "What is left is kept.", "That a node is off ends nothing.", "One that waits writes nothing."
VAGUE_SUBJECT = re.compile(
    r"(?:what(?:ever)?|who(?:ever)?)\b(?!.*\?$)"
    r"|that (?:is|was|has|can|does|a|an|the|it|they|we|you|he|she|nobody|somebody|everybody|every|each|no|some|all|there|what)\b"
    r"|(?:one|those|these) (?:that|who|which|of|is|was|has|can|may|does)\b",
    re.IGNORECASE,
)
_END = re.compile(r"(?<=[.!?])[)\"”*]*\s+(?=[\"(*`]*[A-Z0-9`])|[;:]\s+(?=[A-Z*`])|\n")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc)\.")


def blocks(text: str) -> Iterator[str]:
    """Headings, paragraphs, items of lists and cells of tables, each in one line; no code, no comments."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        new = not line.strip() or re.match(r"\s*(?:[-*] |\d+\. |#|\||!\[)", line)
        if new and block:
            yield " ".join(block)
            block = []
        if line.startswith("|"):
            yield from (cell.strip() for cell in line.strip("|").split("|") if cell.strip(" -"))
        elif line.strip() and not (line.startswith("    ") and not block):
            block.append(re.sub(r"^(?:[-*] |\d+\. |#+ )", "", line.strip()))


def plain(block: str) -> str:
    """A block without its marks. A piece of code, or an address, is one word."""
    block = re.sub(r"!\[.*?\]\(.*?\)", "", block)
    block = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block)
    block = re.sub(r"`[^`]+`", "CODE", block)
    return _ABBREVIATION.sub(lambda match: match[1], block.replace("**", ""))


def sentences(text: str) -> list[str]:
    return [sentence.strip() for block in blocks(text) for sentence in _END.split(plain(block)) if sentence and sentence.strip()]


def words(sentence: str) -> int:
    """Words with a letter or a digit in them."""
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


def longest() -> int:
    """Words of the longest sentence of README and guide."""
    return max(words(sentence) for page in PAGES for sentence in sentences(page.read_text(encoding="utf-8")))


def too_long(text: str) -> list[str]:
    return [f"{words(sentence)} words: {sentence}" for sentence in sentences(text) if words(sentence) > MOST_WORDS]


def vague(text: str) -> list[str]:
    return [f"vague subject: {sentence}" for sentence in sentences(text) if VAGUE_SUBJECT.match(sentence)]


def mean(text: str) -> float:
    """Words of a sentence in the mean; pieces without a verb's chance (headings, cells, items of less than five words) are not counted."""
    counts = [words(sentence) for sentence in sentences(text) if words(sentence) > 4]
    return sum(counts) / len(counts)


if __name__ == "__main__":
    for page in (*PAGES, *FOR_CONTRIBUTORS):
        content = page.read_text(encoding="utf-8")
        print(f"{page.relative_to(REPOSITORY)}: {mean(content):.1f} words a sentence, {len(sentences(content))} sentences")
        print(*(f"  {fault}" for fault in (*too_long(content), *vague(content))), sep="\n")
