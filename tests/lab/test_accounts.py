"""The account files of an isolated node."""

from __future__ import annotations

from pathlib import Path

from homelab.lab.accounts import is_locked, passwd_with_home, shadow_of

PASSWD = "root:x:0:0:root:/root:/bin/bash\nroot2:x:0:0:other:/root:/bin/sh\n# a comment\n"


def test_only_this_users_home_changes() -> None:
    assert passwd_with_home(PASSWD, "root", "/lab/home") == PASSWD.replace("root:x:0:0:root:/root:", "root:x:0:0:root:/lab/home:")


def test_nobody_is_locked_and_nobody_has_a_password(tmp_path: Path) -> None:
    file = tmp_path / "shadow"
    file.write_text(shadow_of(PASSWD))
    assert [line.split(":")[:2] for line in file.read_text().splitlines()] == [["root", "*"], ["root2", "*"]]
    assert not is_locked("root", file)


def test_locked_accounts_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "shadow"
    file.write_text("root:!:19000::::::\nme:!$6$abc:19000::::::\nyou:*:19000::::::\n")
    assert [is_locked(name, file) for name in ("root", "me", "you", "nobody")] == [True, True, False, False]
    assert not is_locked("root", tmp_path / "missing")
