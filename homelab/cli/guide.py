"""The pages of the guide (homelab/docs), in their order: each names the next one in its last line. `homelab explain NAME` shows one."""

from __future__ import annotations

import functools
import pkgutil
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FIRST = "install"
WIDTH = 80
_NEXT = re.compile(r"^Next: \[[^\]]*\]\(([\w-]+)\.md", re.MULTILINE)
_PAGE_LINK = re.compile(r"\[([^\]]+)\]\(([\w-]+)\.md(?:#[\w-]+)?\)")


@dataclass(frozen=True)
class Page:
    """One page: its name, its title, its first sentence, and the whole Markdown text."""

    name: str
    title: str
    summary: str
    text: str

    @property
    def headings(self) -> tuple[str, ...]:
        return tuple(re.findall(r"^#+ (.+)$", self.text, re.MULTILINE))


@functools.cache
def pages() -> dict[str, Page]:
    """All pages by name, the first one first."""
    found: dict[str, Page] = {}
    name = FIRST
    while name not in found:
        found[name] = _read(name)
        following = _NEXT.findall(found[name].text)
        name = following[-1] if following else FIRST
    return found


def about(query: str) -> tuple[Page, ...]:
    """The pages that have all words of `query` in their name or their headings."""
    asked = _words(query)
    return tuple(page for page in pages().values() if asked and asked <= _words(page.name, *page.headings))


def vocabulary() -> tuple[str, ...]:
    """The names of the pages and the words of their headings: the candidates for a mistyped word."""
    words = {word for page in pages().values() for word in _words(*page.headings) if len(word) > 3}
    return (*pages(), *sorted(words - pages().keys()))


def show(console: Console, page: Page) -> None:
    """The page in 80 columns on a terminal; its Markdown as it is where the output goes to a file or a pipe. A line of code is never broken."""
    if not console.is_terminal:
        console.print(page.text.rstrip(), soft_wrap=True, highlight=False)
        return
    console.print(_rendered(page.text), width=min(WIDTH, console.width), crop=False)


def _rendered(text: str) -> RenderableType:
    from rich.console import ConsoleOptions, RenderResult
    from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
    from rich.text import Text

    class Title(Heading):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            yield Text("")
            yield Text(self.text.plain, style="bold underline" if self.tag == "h1" else "bold")

    class Code(CodeBlock):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for line in str(self.text).rstrip().splitlines():
                yield Text(f"  {line}", style="cyan", no_wrap=True, overflow="ignore")

    class Guide(Markdown):
        elements: ClassVar[dict[str, type[MarkdownElement]]] = {
            **Markdown.elements, "heading_open": Title, "fence": Code, "code_block": Code,
        }  # fmt: skip

    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    return Guide(_PAGE_LINK.sub(r"\1 (`homelab explain \2`)", text), hyperlinks=False)


def _read(name: str) -> Page:
    data = pkgutil.get_data("homelab", f"docs/{name}.md")
    assert data is not None, name
    text = data.decode()
    title, _, rest = text.partition("\n\n")
    summary = rest.partition("\n\n")[0]
    return Page(name, title.removeprefix("# "), re.sub(r"\*\*|`", "", summary), text)


def _words(*texts: str) -> set[str]:
    return {word for text in texts for word in re.findall(r"[a-z0-9]+", text.lower())}
