"""The cluster.toml that this project ships: an example to read, whose machines are nobody's. Pure."""

from __future__ import annotations

import hashlib

# The file of this release first, then those of earlier releases, with line ends of one character.
DIGESTS = (
    "1e813730b9131ca0e061e7b1c9f9fa09020978199e9c4ad1142978e19a690efb",
    "7267274e5994a285a554fcdf5dff668fc9dc841f99e051da78c6f4e7874e564a",
    "b281205c9889dfcda740efe30c661297bb69e4b308803a12ff5c7d17369b4504",
    "a36035765ade3c9d51c04ada7731bced1a38af3424e2d29c3c520fb23ced0d21",
)


def is_example(content: bytes) -> bool:
    """Whether these bytes are a cluster.toml as it was shipped. A checkout for Windows may have changed the line ends; any other edit makes it its owner's."""
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest() in DIGESTS
