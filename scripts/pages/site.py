"""The site of the guide: `python -m pages.site FOLDER` writes FOLDER/mkdocs.yml and FOLDER/pages, from README.md and homelab/docs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from homelab.cli import guide

REPOSITORY = Path(__file__).parents[2]
# A site that opens from a disk and loads nothing from elsewhere: no fonts, no scripts of a CDN.
CONFIG: dict[str, Any] = {
    "site_name": "homelab",
    "docs_dir": "pages",
    "site_dir": "site",
    "use_directory_urls": False,
    "theme": {"name": "readthedocs", "highlightjs": False, "navigation_depth": 2},
    "plugins": ["search"],
    "markdown_extensions": ["tables", "fenced_code", {"toc": {"permalink": True}}],
    "validation": {
        "nav": {"omitted_files": "warn", "not_found": "warn", "absolute_links": "warn"},
        "links": {"not_found": "warn", "anchors": "warn", "absolute_links": "warn", "unrecognized_links": "warn"},
    },
}


def stage(folder: Path) -> dict[str, Any]:
    """The sources of mkdocs, and the settings that it reads. The README is the first page; its links to files beside the guide become their names."""
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    for name, page in guide.pages().items():
        (pages / f"{name}.md").write_text(page.text, encoding="utf-8")
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme):
        shutil.copy(REPOSITORY / picture, pages)
        readme = readme.replace(f"({picture})", f"({Path(picture).name})")
    readme = readme.replace("(homelab/docs/", "(")
    readme = re.sub(
        r"(?<!!)\[[^\]]+\]\((?!https://)([\w./]+)\)", lambda link: link[0] if (pages / link[1]).is_file() else f"`{link[1]}`", readme
    )
    (pages / "index.md").write_text(readme, encoding="utf-8")
    config = CONFIG | {"nav": [{"homelab": "index.md"}, *({page.title: f"{name}.md"} for name, page in guide.pages().items())]}
    (folder / "mkdocs.yml").write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
    return config


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
