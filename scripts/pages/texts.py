"""AGENTS.md and llms.txt, made from CONTRIBUTING.md and the guide: `scripts/docs --texts` writes them, the recipes of recipes/models and the README's picture."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from pages import model_recipes, picture

from homelab.cli import guide

REPOSITORY = Path(__file__).parents[2]
_MADE = "made by scripts/docs --texts; change CONTRIBUTING.md and homelab/docs instead"


def llms() -> str:
    """What the project is, and every page with its first sentence (https://llmstxt.org)."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    what = readme.split("\n\n")[1]
    pages = "\n".join(f"- [{page.title}](homelab/docs/{name}.md): {page.summary}" for name, page in guide.pages().items())
    law = guide.pages()["law"].summary
    return (
        f"# homelab\n\n> {what}\n\nThe law: {law[0].lower()}{law[1:]}\n\nAn installed homelab prints each page: `homelab explain NAME`, with --json as JSON.\n\n"
        f"## Guide\n\n{pages}\n\n## Development\n\n"
        "- [CONTRIBUTING.md](CONTRIBUTING.md): set-up, tests, rules of the code\n- [homelab/README.md](homelab/README.md): the map of the code\n"
    )


def agents() -> str:
    """What a program that changes this repository needs: the whole of CONTRIBUTING.md but the parts for owners of cards, and the pages of the guide."""
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    introduction, *sections = re.split(r"^(?=## )", contributing, flags=re.MULTILINE)
    kept = [section for section in sections if not section.startswith("## A measured card")]
    pages = ", ".join(f"`{name}`" for name in guide.pages())
    return (
        f"<!-- {_MADE} -->\n# For programs that change this repository\n\n{introduction.partition(chr(10) * 2)[2]}"
        f"{''.join(kept).rstrip()}\n\n## Guide\n\nThe pages for users are in `homelab/docs/`: {pages}.\n"
        "A command, a check, a recipe or a measured number that changes has its place there; tests hold it.\n"
    )


TEXTS: dict[str, Callable[[], str]] = {"AGENTS.md": agents, "llms.txt": llms, ".assets/dashboard.svg": picture.svg}

if __name__ == "__main__":
    for name, make in TEXTS.items():
        (REPOSITORY / name).write_text(make(), encoding="utf-8")
        print(f"wrote {name}")
    model_recipes.write(REPOSITORY / "recipes" / "models")
    print("wrote recipes/models")
