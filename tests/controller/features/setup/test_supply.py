"""Who fetches a wheel: the node where it reaches the index and this machine does not hold it yet, else this machine, once."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.features.setup import cache, uv_program, wheelhouse
from homelab.controller.features.setup.platform import platform_of
from homelab.controller.features.setup.requirements import Lock, Package
from homelab.controller.features.setup.supply import Supply, is_public
from homelab.shared.protocol.setup_messages import PieceRequest
from tests import builders
from tests.controller.features.setup.test_setup_plan import state

pytestmark = pytest.mark.timeout(30)
NAMES = ("a", "b")


class Agent:
    """Which verbs were used for which file; `error` is what the node says to a fetch."""

    def __init__(self, error: HomelabError | None = None) -> None:
        self.node, self.error = builders.cluster().node("laptop"), error
        self.used: list[tuple[str, str]] = []

    def ask(self, verb: str, request: PieceRequest, **_: object) -> dict[str, Any]:
        self.used.append((verb, request.name))
        if self.error:
            raise self.error
        return {"have": request.size}

    def send(self, verb: str, request: PieceRequest, body: bytes, **_: object) -> dict[str, Any]:
        self.used.append((verb, request.name))
        return {"have": request.offset + len(body)}


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """Two wheels on an index; `wheelhouse.fetch` brings them here as pip does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "uv.whl").write_bytes(b"uv")
    monkeypatch.setattr(uv_program, "fetch", lambda machine: tmp_path / "uv.whl")
    packages = []
    for name in NAMES:
        file = tmp_path / "index" / f"{name}-1.0-py3-none-any.whl"
        file.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(f"{name}.py", "1\n" * 100)
        content = file.read_bytes()
        packages.append(
            Package(
                name=name,
                version="1.0",
                sha256=hashlib.sha256(content).hexdigest(),
                wheel=file.name,
                url=f"https://index.example/{file.name}",
                size_bytes=len(content),
            )
        )

    def fetch(resolved: Lock, platform: object) -> None:
        wheels = tmp_path / "cache/homelab/setup/wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        for package in resolved.packages:
            (wheels / package.wheel).write_bytes((tmp_path / "index" / package.wheel).read_bytes())
        said.append("fetched here")

    said: list[str] = []
    monkeypatch.setattr(wheelhouse, "fetch", fetch)
    monkeypatch.setattr(Lock, "said", said, raising=False)
    return Lock(packages=tuple(packages))


def brought(lock: Lock, agent: Agent, **options: Any) -> list[str]:
    """The verb for each of the two wheels."""
    supply = Supply(lock, platform_of("n", state(), "3.11"), lambda text: None, with_python=False, **{"fetches_here": False, **options})
    refused: set[str] = set()
    for part in supply.parts:
        supply.bring(agent, part, 0, lambda count: None, refused)  # type: ignore[arg-type]
    assert {"uv.whl", "requirements.txt"} <= {name for verb, name in agent.used if verb == "setup-receive"}
    return [verb for verb, name in agent.used if name.startswith("wheels/")]


def test_a_node_that_reaches_the_index_fetches_for_itself(lock: Lock) -> None:
    assert brought(lock, Agent()) == ["setup-fetch", "setup-fetch"]
    assert not wheelhouse.parts(lock), "nothing was fetched here"


def test_what_lies_here_is_sent(lock: Lock) -> None:
    wheelhouse.fetch(lock, platform_of("n", state(), "3.11"))
    assert brought(lock, Agent()) == ["setup-receive", "setup-receive"]


def test_a_node_without_a_way_out_is_asked_once_and_everything_is_sent(lock: Lock) -> None:
    refused = HomelabError("it cannot be fetched: Network is unreachable", where="w", hint="h")
    assert brought(lock, Agent(refused)) == ["setup-fetch", "setup-receive", "setup-receive"]


def test_all_is_fetched_here_where_that_was_asked_for_or_the_index_does_not_say_sizes(lock: Lock) -> None:
    assert brought(lock, Agent(), fetches_here=True) == ["setup-receive", "setup-receive"]
    for wheel in (package.wheel for package in lock.packages):
        (Path(cache.folder()) / "wheels" / wheel).unlink()
    unsized = Lock(packages=tuple(package.model_copy(update={"size_bytes": 0}) for package in lock.packages))
    assert brought(unsized, Agent()) == ["setup-receive", "setup-receive"]


def test_a_node_that_is_gone_ends_it(lock: Lock) -> None:
    with pytest.raises(UnreachableError):
        brought(lock, Agent(UnreachableError("no answer", where="w", hint="h")))


def test_an_address_with_a_password_is_not_given_to_a_node() -> None:
    assert is_public("https://files.pythonhosted.org/a.whl") and is_public("http://10.0.0.1:80/a.whl")
    assert not any(
        is_public(url) for url in ("https://me:secret@index.example/a.whl", "https://token@index.example/a.whl", "file:///opt/a.whl")
    )
