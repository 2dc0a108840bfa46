"""What is to be installed: the worker's packages with the torch that suits the fleet, or the lines of a file."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from homelab import __distribution__
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.features.preflight import gather
from homelab.controller.planning.environment.torch_choice import TorchChoice, fleet_build
from homelab.controller.remote.fanout import Fleet


@dataclass(frozen=True)
class WantedPackages:
    """`lines` as in a requirements file, and `alone`, lines of packages that are installed without what they name; `torch` None where a file says everything."""

    lines: tuple[str, ...]
    torch: TorchChoice | None
    alone: tuple[str, ...] = ()

    @property
    def index(self) -> str | None:
        """A second package index, for a build of torch that PyPI does not have."""
        return self.torch.index if self.torch else None


def of_file(path: Path) -> WantedPackages:
    """The lines of a requirements file, each a name with or without a version. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the requirements cannot be read: {getattr(error, 'strerror', None) or error}", where=str(path), hint=homelab("setup --help")
        ) from None
    lines = tuple(line for raw in text.splitlines() if (line := raw.partition("#")[0].strip()))
    for line in lines:
        if not re.match(r"[A-Za-z0-9]", line):
            raise InputError(
                f"not the name of a package: {line!r}",
                where=str(path),
                hint="write one package on each line, with or without a version: humanize==4.17.0",
            )
    return WantedPackages(lines, None)


def of_fleet(fleet: Fleet, say: Say, *, unsloth: bool) -> WantedPackages:
    """The worker's packages, or those that train with Unsloth, and the torch for all nodes of the cluster: that of a part would not suit the others.

    Raises HomelabError where no build suits all, and the error of a node that does not answer.
    """
    gathered = gather.facts(fleet, recipe=None, material=[], port=29500, say=say)
    for error in gathered.unreachable.values():
        raise error
    torch = fleet_build(gathered.facts)
    if unsloth:
        # Lines of requirements (name==version) for all but torch. Without what they name beside it: not all of that is needed here.
        lines = resources.files(__package__).joinpath("unsloth-packages.txt").read_text(encoding="utf-8").splitlines()
        return WantedPackages((torch.requirement,), torch, tuple(line for line in lines if line and not line.startswith(("#", "torch=="))))
    return WantedPackages((torch.requirement, *_worker_packages()), torch)


def _worker_packages() -> list[str]:
    """What homelab's own metadata lists under `worker` (pyproject.toml), without torch."""
    extra = re.compile(r"""\s*;\s*extra\s*==\s*["']worker["']""")
    try:
        listed = [extra.sub("", line) for line in importlib.metadata.requires(__distribution__) or [] if extra.search(line)]
    except importlib.metadata.PackageNotFoundError:
        listed = []
    if not listed:
        raise HomelabError(
            "the list of the worker's packages is missing: homelab is not installed here as a package", where="this machine",
            hint=Hint("install it with pip, or name the packages: {}", homelab("setup --requirements FILE")),
        )  # fmt: skip
    return [line for line in listed if re.split(r"[\s<>=!~\[;]", line)[0] != "torch"]
