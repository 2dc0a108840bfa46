"""What a node lacks, and what setup refuses before it begins."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.facts.reading import read
from homelab.controller.features.setup import setup_plan
from homelab.controller.features.setup.platform import SENT_PYTHON, fleet_python, platform_of
from homelab.controller.features.setup.requirements import Lock, Package, joined, lock_of_report
from homelab.controller.features.setup.setup_plan import NeededFile
from homelab.shared.protocol.setup_messages import SetupState

WHEELS = {name: f"{name}-1.0-py3-none-any.whl" for name in ("a", "b")}
LOCK = Lock(
    packages=tuple(
        Package(name=name, version="1.0", sha256="ab" * 32, wheel=wheel, url=f"https://x/{wheel}") for name, wheel in WHEELS.items()
    )
)
PARTS = [
    NeededFile(name="uv.whl", sha256="01" * 32, size_bytes=100),
    NeededFile(name="wheels/a.whl", sha256="02" * 32, size_bytes=50, unpacked_bytes=500),
]


def state(**changes: Any) -> SetupState:
    return read(SetupState, {
        "machine": "x86_64", "libc": "glibc 2.36", "pythons": {"3.11": "/usr/bin/python3.11"}, "environment_exists": True, "environment_is_ours": True,
        "environment_python": "3.11.2", "packages": {"a": "1.0", "b": "1.0"}, "lock": LOCK.digest, "good": [], "partial": {}, "disk_free": 10**12, **changes,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "nothing to do"),
        ({"packages": {}, "lock": ""}, "install a, b"),
        ({"packages": {"a": "0.9", "b": "1.0", "c": "2"}}, "exchange a 0.9 -> 1.0; remove c"),
        ({"packages": {f"p{number}": "1" for number in range(9)}}, "install a, b; remove p0, p1, p2, p3, p4, p5 and 3 more"),
        ({"lock": ""}, "make it again: it is not complete, or has another Python"),
        ({"environment_python": "3.12.1"}, "make it again: it is not complete, or has another Python"),
        ({"environment_is_ours": False}, "install a, b"),
    ],
)
def test_the_difference_in_words(changes: dict[str, Any], text: str) -> None:
    found = setup_plan.difference(state(**changes), LOCK, "3.11")
    assert found.text == text and found.is_whole == (text == "nothing to do")


def test_the_difference_tells_how_much_it_is() -> None:
    sized = LOCK.with_sizes({"https://x/a-1.0-py3-none-any.whl": 1_500_000, "https://x/b-1.0-py3-none-any.whl": 500_000})
    assert sized.digest == LOCK.digest
    assert setup_plan.difference(state(packages={"c": "1"}), sized, "3.11").text == "install a, b; remove c; 2.0 MB of wheels"
    assert setup_plan.difference(state(packages={"a": "1.0"}), sized, "3.11").text == "install b; 500.0 kB of wheels"


def test_two_resolutions_are_joined() -> None:
    other = Lock(packages=(LOCK.packages[1].model_copy(update={"version": "2.0"}), LOCK.packages[0].model_copy(update={"name": "c"})))
    both = joined(LOCK, other)
    assert both.versions == {"a": "1.0", "b": "1.0", "c": "1.0"} and list(both.versions) == ["a", "b", "c"]
    assert LOCK.is_closed and not both.is_closed


def test_only_what_is_not_there_is_sent() -> None:
    assert setup_plan.plan(state(), PARTS).send_bytes == 150
    steps = setup_plan.plan(state(good=["uv.whl"], partial={"wheels/a.whl": 20}), PARTS)
    assert [part.name for part in steps.parts] == ["wheels/a.whl"] and steps.send_bytes == 30 and steps.disk_bytes == 530


def test_a_full_disk_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(HomelabError, match="the disk has 100\\.0 MB free, and the environment needs 200\\.0 MB"):
        setup_plan.check_room("n", state(disk_free=100_000_000), setup_plan.plan(state(), PARTS))


def test_an_environment_of_somebody_else_is_left_alone() -> None:
    setup_plan.check_environment("n", "~/env", state())
    somebodys = state(environment_is_ours=False, environment_python="3.12.1")
    setup_plan.check_environment("n", "~/env", somebodys)
    assert setup_plan.is_somebodys(somebodys) and not setup_plan.is_somebodys(state())
    broken = state(environment_is_ours=False, environment_python="")
    assert not setup_plan.is_somebodys(broken)
    with pytest.raises(HomelabError, match="did not make"):
        setup_plan.check_environment("n", "~/env", broken)


def test_the_nodes_get_one_python() -> None:
    older, newer = state(pythons={"3.11": "/a"}), state(pythons={"3.13": "/c", "3.11": "/b"})
    assert fleet_python({"x": older, "y": newer}) == "3.11", "the one that both have"
    assert fleet_python({"y": newer}) == "3.13" and fleet_python({"y": newer, "bare": state(pythons={})}) == "3.13"
    assert fleet_python({"x": older, "z": older, "y": state(pythons={"3.13": "/c"})}) == "3.11", "fewer nodes need one to be sent"
    assert fleet_python({"bare": state(pythons={})}) == fleet_python({}) == SENT_PYTHON
    tags = platform_of("x", older, "3.11").tags
    assert tags[0] == "manylinux_2_36_x86_64" and "manylinux_2_17_x86_64" in tags and "manylinux2014_x86_64" in tags


@pytest.mark.parametrize("changes", [{"libc": ""}, {"libc": "glibc 2.12"}, {"machine": "riscv64"}])
def test_a_node_that_setup_can_do_nothing_for(changes: dict[str, Any]) -> None:
    with pytest.raises(HomelabError) as caught:
        platform_of("n", state(**changes), "3.11")
    assert caught.value.where.startswith("node n") and caught.value.hint


def test_the_lock_is_what_pip_has_resolved() -> None:
    entry = {
        "metadata": {"name": "Foo_Bar", "version": "1.0+cpu"},
        "download_info": {"url": "https://x/Foo_Bar-1.0%2Bcpu-py3-none-any.whl#sha256=1"},
    }
    entry["download_info"]["archive_info"] = {"hashes": {"sha256": "ab" * 32}}
    lock = lock_of_report({"install": [entry]})
    assert lock.text == f"foo-bar==1.0+cpu --hash=sha256:{'ab' * 32}\n" and lock.packages[0].wheel == "Foo_Bar-1.0+cpu-py3-none-any.whl"
    assert lock.packages[0].download_line == f"foo-bar @ https://x/Foo_Bar-1.0%2Bcpu-py3-none-any.whl --hash=sha256:{'ab' * 32}"
    with pytest.raises(ValueError, match="no sha256"):
        lock_of_report({"install": [{**entry, "download_info": {"url": "https://x/y.whl"}}]})
