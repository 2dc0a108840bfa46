"""`homelab explain`: the pages of the guide, and the known problems of home machines: symptoms, causes and fixes. It contacts no node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from homelab.cli import common, completion

if TYPE_CHECKING:
    from rich.console import RenderableType

    from homelab.cli.clean_console import CleanConsole
    from homelab.cli.guide import Page
    from homelab.controller.diagnose.topic_index import Topic

_FEW_WORDS = 3  # more than these are a line, not a topic


def command(
    topic: Annotated[
        list[str] | None,
        typer.Argument(
            help="A page of the guide (install), a key (recipe.train.seed), a topic, a check (network.mtu), a word or a line of a log. Default: list all pages and topics.",
            show_default=False,
            autocompletion=completion.explained,
        ),
    ] = None,
    as_json: common.JsonOption = False,
) -> int:
    """Show a page of the guide, or a known problem: its signs, its cause, its fix, and the checks that find it. Exit code 2 for an unknown topic."""
    from homelab.cli import explain_key, guide
    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.diagnose import topic_index

    query = " ".join(topic or []).strip()
    if explain_key.is_key(query):
        if as_json:
            common.print_json(explain_key.document(query))
        else:
            CleanConsole().print(explain_key.text(query), markup=False, highlight=False, soft_wrap=True)
        return 0
    page = guide.pages().get(query.lower())
    topics = topic_index.find(query) if query else topic_index.TOPICS
    near = guide.about(query) if 0 < len(query.split()) <= _FEW_WORDS else ()
    pages = (page,) if page else near if query else tuple(guide.pages().values())
    if query and not topics and not pages:
        raise _unknown(query)
    if as_json:
        common.print_json(_all(pages, topics, whole=page is not None))
        return 0
    console = CleanConsole()
    if page or (not topics and len(pages) == 1):
        _show_page(console, pages[0], topics)
        return 0
    if len(topics) == 1:
        console.print(_page(topics[0], console.width), soft_wrap=True)
        console.print(f"\nNext: {_next_command(topics[0])}", markup=False, highlight=False, soft_wrap=True)
        return 0
    if query and topics:
        console.print(f'{len(topics)} topics mention "{query}":', markup=False, highlight=False)
    console.print(_list(pages, topics))
    console.print(f"\nTo read one: homelab explain {topics[0].id if topics else pages[0].name}", markup=False, highlight=False)
    return 0


def _show_page(console: CleanConsole, page: Page, topics: tuple[Topic, ...]) -> None:
    """The page, and after it the problems that speak of its name. The page of the law ends with the list of what holds it."""
    from homelab.cli import explain_key, guide
    from homelab.controller.config import reference

    guide.show(console, page)
    if page.name in reference.SECTIONS:
        console.print(
            f"\nThe sections, key by key (homelab explain NAME):\n{explain_key.sections(page.name)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if page.name == "law":
        console.print("")
        console.print(_influences())
    elif topics:
        ids = ", ".join(topic.id for topic in topics)
        console.print(f"\nProblems that mention it (homelab explain NAME): {ids}", highlight=False, soft_wrap=True)


def _influences() -> RenderableType:
    """What may decide a training beside its recipe, and what holds each."""
    from rich.table import Table

    from homelab.shared.law.influences import INFLUENCES

    table = Table("beside the recipe", "what holds it", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for influence in INFLUENCES:
        table.add_row(influence.name, influence.holds)
    return table


def _all(pages: tuple[Page, ...], topics: tuple[Topic, ...], whole: bool) -> dict[str, Any]:
    """The JSON document. The text of a page is in it where that page was asked for."""
    from dataclasses import asdict

    from homelab.shared.law.influences import INFLUENCES

    listed = [{"name": page.name, "title": page.title, "summary": page.summary} | ({"text": page.text} if whole else {}) for page in pages]
    law = {"law": [asdict(influence) for influence in INFLUENCES]} if whole and pages[0].name == "law" else {}
    return {**law, "pages": listed, "topics": [_document(entry) for entry in topics]}


def _unknown(query: str) -> Exception:
    from homelab.cli import guide
    from homelab.controller.base.errors import InputError, did_you_mean
    from homelab.controller.base.hint import Hint, homelab
    from homelab.controller.base.sanitize import plain_name
    from homelab.controller.base.units import listed
    from homelab.controller.diagnose import topic_index

    where = "the argument of homelab explain"
    if len(query.split()) > _FEW_WORDS:
        near = topic_index.nearest(query)
        topics = (
            f"similar topics are {listed(topic.id for topic in near)} (homelab explain {near[0].id})" if near else "and no topic is similar"
        )
        return InputError(
            f'no rule matches the line "{plain_name(query)}"; {topics}',
            where=where,
            hint=Hint("homelab explain lists all topics; for a run: {}", homelab("why RUN")),
        )
    near_word = did_you_mean(query[:200].lower(), (*guide.pages(), *topic_index.vocabulary(), *guide.vocabulary()))
    return InputError(
        f'there is no page or topic "{plain_name(query)}".{near_word}', where=where, hint="homelab explain lists all pages and topics"
    )


def _document(topic: Topic) -> dict[str, Any]:
    return {
        "id": topic.id, "title": topic.title, "seen": list(topic.seen), "cause": topic.cause, "do": list(topic.do),
        "checks": [*topic.checks, *topic.checks_too], "rules": list(topic.rules),
        "next": _next_command(topic),
    }  # fmt: skip


def _list(pages: tuple[Page, ...], topics: tuple[Topic, ...]) -> RenderableType:
    """The pages of the guide, then the topics under the headings of their groups: names and titles."""
    from rich.table import Table
    from rich.text import Text

    from homelab.controller.diagnose import topic_index

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    if pages:
        table.add_row(Text("the guide", style="bold"), "")
    for page in pages:
        table.add_row(Text(f"  {page.name}"), Text(page.summary))
    for heading, group in topic_index.GROUPS.items():
        of_group = [topic for topic in group if topic in topics]
        if of_group:
            table.add_row(Text(heading, style="bold"), "")
        for topic in of_group:
            table.add_row(Text(f"  {topic.id}"), Text(topic.title))
    return table


def _page(topic: Topic, width: int) -> RenderableType:
    """One topic. The prose is wrapped to `width`, steps and commands are not, so that they can be copied whole."""
    import textwrap

    from rich.console import Group
    from rich.text import Text

    def part(heading: str, lines: Iterable[str]) -> list[Text]:
        body = [Text(f"  {line}") for line in lines]
        return [Text(""), Text(heading, style="dim"), *body] if body else []

    return Group(
        Text.assemble((topic.title, "bold"), (f"  ({topic.id})", "dim")),
        *part("what is seen", topic.seen),
        *part("why", textwrap.wrap(topic.cause, max(30, min(width, 120) - 2))),
        *part("what to do", topic.do),
        *part("checks that find it", (_command(check) for check in (*topic.checks, *topic.checks_too))),
    )


def _next_command(topic: Topic) -> str:
    """What to type first: the topic's own, else the check that finds it, else what tells of the newest run that failed."""
    checks = (*topic.checks, *topic.checks_too)
    return topic.next_command or (_command(checks[0]) if checks else "homelab why")


def _command(check: str) -> str:
    """What runs this check; some need a recipe, or the real backend."""
    subject = check.partition(".")[0]
    needs = " RECIPE" if subject in ("model", "data", "fit") else " --deep" if subject == "collective" else ""
    return f"homelab preflight{needs} --only {check}"
