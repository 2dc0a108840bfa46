"""The packages of an environment on the controller: resolved once (the lock), and fetched where they are not here yet."""

from __future__ import annotations

import json
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.units import decimal_size, listed
from homelab.controller.features.setup import cache
from homelab.controller.features.setup.platform import Platform
from homelab.controller.features.setup.requirements import Lock, Package, joined, key_of, lock_of_report
from homelab.controller.features.setup.setup_plan import NeededFile
from homelab.controller.features.setup.wanted import WantedPackages
from homelab.shared.protocol import files
from homelab.shared.protocol.digest import file_sha256

_SIZE_TIMEOUT_S = 10.0
_SIZES_AT_ONCE = 16


def lock(wanted: WantedPackages, platform: Platform, *, anew: bool = False) -> Lock:
    """The lock of what is wanted, as it was resolved first; with `anew` with the versions of today. Raises HomelabError."""
    alone = ["alone:", *wanted.alone] if wanted.alone else []
    place = cache.folder() / "locks" / f"{key_of([*wanted.lines, wanted.index or '', *alone], platform.name)}.json"
    if place.is_file() and not anew:
        try:
            return Lock.model_validate(files.read_json(place))
        except ValidationError:
            pass  # damaged: resolved anew
    # What is installed alone has fixed versions, which hold for what torch names, too; but a torch for cards names the triton that belongs to it.
    constraints = [line for line in wanted.alone if not line.startswith("triton==")]
    resolved = _resolve(wanted.lines, [*_for(platform), *(["--extra-index-url", wanted.index] if wanted.index else [])], constraints)
    if wanted.alone:
        resolved = joined(resolved, _resolve(wanted.alone, ["--no-deps", *_for(platform)], ()))
    resolved = resolved.with_sizes(sizes_of(package.url for package in resolved.packages))
    files.write_json(place, resolved.model_dump())
    return resolved


def _resolve(wanted: Sequence[str], options: Sequence[str], constraints: Sequence[str]) -> Lock:
    with tempfile.TemporaryDirectory(prefix="homelab-setup-") as folder:
        lines, limits, report = Path(folder, "wanted.txt"), Path(folder, "constraints.txt"), Path(folder, "report.json")
        lines.write_text("".join(f"{line}\n" for line in wanted), encoding="utf-8")
        limits.write_text("".join(f"{line}\n" for line in constraints), encoding="utf-8")
        # --target is what pip wants with --platform; nothing is installed (--dry-run). One retry: an index that cannot be reached is asked for every package.
        arguments = [
            "install",
            "-q",
            "--retries",
            "1",
            "--dry-run",
            "--ignore-installed",
            "--target",
            str(Path(folder, "none")),
            "--report",
            str(report),
        ]
        cache.pip([*arguments, *options, "-r", str(lines), "-c", str(limits)], "the packages cannot be resolved")
        try:
            return lock_of_report(json.loads(report.read_text(encoding="utf-8")))
        except (KeyError, TypeError, ValueError) as error:
            raise HomelabError(
                f"setup cannot use what pip resolved: {error}", where="this machine", hint=Hint("{}", homelab("setup --help"))
            ) from None


def fetch(resolved: Lock, platform: Platform) -> None:
    """Have every wheel of the lock here, with the content that the lock names. Raises HomelabError."""
    wheels = cache.folder() / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    lacking = [package for package in resolved.packages if not _is_good(wheels / package.wheel, package)]
    if not lacking:
        return
    for package in lacking:
        (wheels / package.wheel).unlink(missing_ok=True)  # a damaged one, which pip would take for the right one
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=wheels) as folder:
        lines = Path(folder, "requirements.txt")
        lines.write_text("".join(f"{package.download_line}\n" for package in lacking), encoding="utf-8")
        arguments = ["download", "-q", "--no-deps", "--require-hashes", "-d", folder, *_for(platform), "-r", str(lines)]
        sizes = listed(
            f"{package.name} {package.version}{f' ({decimal_size(package.size_bytes)})' if package.size_bytes else ''}"
            for package in lacking
        )
        total = decimal_size(sum(package.size_bytes for package in lacking))
        cache.pip(arguments, f"these packages are not on this machine, and cannot be fetched ({total} in total): {sizes}")
        for package in lacking:
            Path(folder, package.wheel).replace(wheels / package.wheel)


def parts(resolved: Lock) -> list[NeededFile]:
    """The wheels that lie here, as files to send."""
    wheels = cache.folder() / "wheels"
    return [_part(wheels / package.wheel, package) for package in resolved.packages if _is_good(wheels / package.wheel, package)]


def _part(path: Path, package: Package) -> NeededFile:
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    return NeededFile(name=f"wheels/{package.wheel}", sha256=package.sha256, size_bytes=path.stat().st_size, unpacked_bytes=unpacked)


def _is_good(path: Path, package: Package) -> bool:
    return path.is_file() and file_sha256(path) == package.sha256


def _for(platform: Platform) -> list[str]:
    words = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", platform.python]
    for tag in platform.tags:
        words += ["--platform", tag]
    return words


def sizes_of(addresses: Iterable[str]) -> dict[str, int]:
    """{address: bytes}, without those whose server does not say."""
    addresses = list(addresses)
    with ThreadPoolExecutor(max_workers=_SIZES_AT_ONCE, thread_name_prefix="size") as pool:
        return {address: size for address, size in zip(addresses, pool.map(_size, addresses), strict=True) if size}


def _size(address: str) -> int:
    try:
        # a file's address, too
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_SIZE_TIMEOUT_S) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0
