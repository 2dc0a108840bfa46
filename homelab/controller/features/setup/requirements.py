"""What the worker environment holds: the packages with their versions and hashes, once resolved and from then on the same for all nodes. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import Field

from homelab.controller.base.models import WireModel


class Package(WireModel):
    """One wheel. `name` as pip compares names (PEP 503); `size_bytes` 0 where its server does not say."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*\z")]
    version: Annotated[str, Field(pattern=r"^[\w.+!-]+\z")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
    wheel: Annotated[str, Field(pattern=r"^\w[\w.+!-]*\.whl\z")]
    url: Annotated[str, Field(pattern=r"^(https?|file)://\S+\z")]
    size_bytes: Annotated[int, Field(ge=0)] = 0

    @property
    def line(self) -> str:
        """Its line of requirements.txt."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"

    @property
    def download_line(self) -> str:
        """The same for pip on the controller: from where it was resolved, so that no index is asked again."""
        return f"{self.name} @ {self.url} --hash=sha256:{self.sha256}"


class Lock(WireModel):
    """The packages of one platform, by name. `is_closed`: they are all that they name."""

    packages: tuple[Package, ...]
    is_closed: bool = True

    @property
    def text(self) -> str:
        """requirements.txt."""
        return "".join(f"{package.line}\n" for package in self.packages)

    @property
    def digest(self) -> str:
        """sha256 of the text: what a node says that it has installed."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def with_sizes(self, sizes_bytes: Mapping[str, int]) -> Lock:
        """The same with the sizes by address."""
        return self.model_copy(
            update={
                "packages": tuple(package.model_copy(update={"size_bytes": sizes_bytes.get(package.url, 0)}) for package in self.packages)
            }
        )

    @property
    def versions(self) -> dict[str, str]:
        """{name: version}."""
        return {package.name: package.version for package in self.packages}


def joined(first: Lock, second: Lock) -> Lock:
    """The packages of both; where both name one, it is that of the first. The second was resolved without what its packages name."""
    packages = {package.name: package for package in (*second.packages, *first.packages)}
    return Lock(packages=tuple(packages[name] for name in sorted(packages)), is_closed=False)


def normal(name: str) -> str:
    """A package's name as pip compares names: Jinja2 and jinja_2 are not the same, typing_extensions and typing-extensions are."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_of_report(report: Mapping[str, Any]) -> Lock:
    """From what `pip install --dry-run --report` writes. Raises ValueError for an entry without a hash, or that is no wheel."""
    packages = []
    for entry in report["install"]:
        info = entry["download_info"]
        hashes = (info.get("archive_info") or {}).get("hashes") or {}
        url = str(info["url"]).partition("#")[0]
        wheel = unquote(url.rsplit("/", 1)[-1])
        name, version = normal(entry["metadata"]["name"]), entry["metadata"]["version"]
        if "sha256" not in hashes:
            raise ValueError(f"{name} {version} has no sha256 in the index that it comes from")
        packages.append(Package(name=name, version=version, sha256=hashes["sha256"], wheel=wheel, url=url))
    return Lock(packages=tuple(sorted(packages, key=lambda package: package.name)))


def key_of(wanted: Iterable[str], platform: str) -> str:
    """The name under which the controller keeps the lock of these requirement lines and this platform: 16 hex digits."""
    return hashlib.sha256("\n".join([platform, *wanted]).encode()).hexdigest()[:16]
