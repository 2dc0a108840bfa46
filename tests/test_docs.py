"""The pages of the guide: one chain from the first to the last, links that lead somewhere, and the texts that are made from them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pages import site, texts

from homelab.cli import guide
from tests.english import DOCS, PAGES, REPOSITORY

pytestmark = pytest.mark.timeout(20)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def broken_links(path: Path, text: str) -> list[str]:
    """Links of a page to a file or a heading that is not there. Addresses of the web are not asked."""
    broken = []
    for link in LINK.findall(re.sub(r"`[^`]*`", "", text)):
        if link.startswith("https://"):
            continue
        name, _, heading = link.partition("#")
        target = path.parent / name if name else path
        if not target.is_file() or (heading and heading not in slugs(target.read_text(encoding="utf-8"))):
            broken.append(f"{path.name}: {link}")
    return broken


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_seen() -> None:
    page = DOCS / "plan.md"
    assert broken_links(page, "[a](nowhere.md) [b](plan.md#nothing) [c](#the-output) [d](https://x.example)") == [
        "plan.md: nowhere.md",
        "plan.md: plan.md#nothing",
    ]


def test_the_pages_are_one_chain() -> None:
    assert set(guide.pages()) == {path.stem for path in DOCS.glob("*.md")}, (
        "a page is reached from the one before it: Next: [title](page.md)"
    )
    for name, page in guide.pages().items():
        last = page.text.rstrip().rpartition("\n\n")[2]
        assert re.fullmatch(r"Next: \[[^\]]+\]\([\w-]+\.md\).*\.", last), f"{name}.md ends with the next page"
        assert page.text.startswith("# ") and page.summary.endswith("."), name
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert [name for name in guide.pages() if f"(homelab/docs/{name}.md)" not in readme] == []


def test_the_site_has_every_page_in_the_order_of_the_guide(tmp_path: Path) -> None:
    config = site.stage(tmp_path)
    assert [next(iter(entry.values())) for entry in config["nav"]] == ["index.md", *(f"{name}.md" for name in guide.pages())]
    staged = tmp_path / "pages"
    for path in staged.glob("*.md"):
        assert broken_links(path, path.read_text(encoding="utf-8")) == [], path.name
    assert (staged / "dashboard.svg").is_file() and "](install.md)" in (staged / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", texts.TEXTS)
def test_the_texts_for_programs_are_those_of_the_guide(name: str) -> None:
    assert (REPOSITORY / name).read_text(encoding="utf-8") == texts.TEXTS[name](), "make them again: scripts/docs --texts"


def test_the_picture_is_a_real_run_and_loads_nothing() -> None:
    picture = texts.TEXTS[".assets/dashboard.svg"]()
    words = "".join(ElementTree.fromstring(picture).itertext()).replace("\xa0", " ")
    assert "trains: step" in words and "homelab recover" in words and "…" not in words and "[W1" not in words
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
