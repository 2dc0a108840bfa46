"""How far a transfer is, in words."""

from __future__ import annotations

from homelab.controller.features.setup.transfer_progress import TransferState, line_of


def test_each_node_has_its_part_of_the_line() -> None:
    begun = TransferState(total_bytes=3_000_000_000, began_s=100.0)
    assert line_of({"tower": begun}, 100.0) == "tower: 0 bytes of 3.0 GB"
    going = begun.with_more(1_000_000_000)
    assert line_of({"tower": going, "laptop": begun.done("installing 60 packages")}, 110.0) == (
        "tower: 1.0 GB of 3.0 GB, 100.0 MB/s, 20 s left; laptop: installing 60 packages"
    )
    assert going.with_more(-1_000_000_000).text(120.0) == "0 bytes of 3.0 GB", "a damaged file begins anew"
