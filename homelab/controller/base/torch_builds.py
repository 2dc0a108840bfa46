"""Which CUDA builds of torch exist, which cards they have code for, and the one to install on a node. Pure.

Sources: the support matrix in pytorch's RELEASE.md (2.11: pull request 175253; 2.12 without CUDA 12.8: issue 178665, pull
request 179072; 2.13: the wheels beside it at data.pyg.org/whl name cu126, cu130 and cu132), and for drivers the table of minimum
versions in the release notes of the CUDA toolkit (minor version compatibility): 12.x runs from driver 525 on, 13.x from 580.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TORCH = "2.13.0"  # what constraints.txt pins, and what a node without a usable release of its own is told to install

Capability = tuple[int, int]


@dataclass(frozen=True)
class Build:
    """One build of a release: its CUDA version, the architectures it holds code for, and the oldest driver on Linux (major version)."""

    cuda: str
    architectures: tuple[str, ...]
    driver: int

    @property
    def tag(self) -> str:
        """cu130 for CUDA 13.0: the name of the folder of wheels, and the local part of the version."""
        return "cu" + self.cuda.replace(".", "")

    @property
    def index(self) -> str:
        """The address for pip's --index-url."""
        return f"https://download.pytorch.org/whl/{self.tag}"

    def runs_on(self, capabilities: Iterable[Capability]) -> bool:
        """Whether it has code for all of these cards."""
        return all(has_kernels(self.architectures, major, minor) for major, minor in capabilities)

    def suits(self, driver_cuda: str | None) -> bool:
        """Whether a driver that knows this CUDA version ("13.0") runs it: any of the same major version or a later one. None: not known, so yes."""
        return driver_cuda is None or _first_number(driver_cuda) >= _first_number(self.cuda)


_OLD = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
_BLACKWELL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
_CU126 = Build("12.6", _OLD, 525)
_CU128 = Build("12.8", _BLACKWELL, 525)
_CU130 = Build("13.0", _BLACKWELL, 580)
_CU132 = Build("13.2", _BLACKWELL, 580)

# Releases whose builds are known, with the builds in the order in which they are offered. Volta, which the builds for CUDA 12.8
# of 2.9 and 2.10 still had, is left to CUDA 12.6, that has it everywhere.
BUILDS: dict[tuple[int, int], tuple[Build, ...]] = {
    (2, 9): (_CU130, _CU128, _CU126),
    (2, 10): (_CU130, _CU128, _CU126),
    (2, 11): (_CU130, _CU128, _CU126),
    (2, 12): (_CU130, _CU126, _CU132),
    (2, 13): (_CU130, _CU126, _CU132),
}
# Of TORCH: for Turing (GTX 16xx, RTX 20xx) and every card since, and for those before.
FROM_TURING, BEFORE_TURING = _CU130, _CU126


def builds_of(release: str) -> tuple[Build, ...]:
    """The builds of a release ("2.13.0", with or without a local part); none where they are not known here."""
    match = re.match(r"(\d{1,9})\.(\d{1,9})", release)
    return BUILDS.get((int(match[1]), int(match[2])), ()) if match else ()


def build_for(release: str, capabilities: Iterable[Capability], driver_cuda: str | None) -> Build | None:
    """The build of a release for these cards: one that the driver runs, else one that a newer driver runs, else None: no build has code for all."""
    cards = list(capabilities)
    fit = [build for build in builds_of(release) if build.runs_on(cards)]
    return next((build for build in fit if build.suits(driver_cuda)), fit[0] if fit else None)


def has_kernels(architectures: Iterable[str], major: int, minor: int) -> bool:
    """Whether code for these architectures runs on a card of this compute capability.

    Binary code (sm_86) runs on the same major version with the same or a later minor one, PTX (compute_80) on everything later,
    an "a" architecture (sm_90a) on exactly its own. Source: CUDA C++ programming guide, "Compute capabilities"; torch._C's
    own check (torch/cuda/__init__.py, _check_capability) is looser and only warns.
    """
    for entry in architectures:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", entry)
        if parts is None:
            continue
        kind, its_major, its_minor, special = parts[1], int(parts[2]), int(parts[3]), parts[4]
        if special == "a":
            runs = (its_major, its_minor) == (major, minor)
        elif kind == "compute":
            runs = (its_major, its_minor) <= (major, minor)
        else:
            runs = its_major == major and its_minor <= minor
        if runs:
            return True
    return False


def _first_number(version: str) -> int:
    match = re.match(r"\d{1,9}", version)
    return int(match[0]) if match else 0
