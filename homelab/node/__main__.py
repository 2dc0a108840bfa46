"""`python -m homelab.node VERB [MARK]`: the entry of the agent. An older Python must be able to parse it and to report that it is too old.

The verbs are in `homelab.node.verbs`. This file and the packages that it imports before the check use the syntax of Python 3.6.
"""

import json
import sys

_OLDEST = (3, 9)


def main() -> int:
    """Check the version of this Python, then answer one verb."""
    # a first line of our own: what this Python itself prints on start (sitecustomize) comes before it
    if len(sys.argv) > 2 and sys.argv[1] not in ("watch", "standby"):
        sys.stdout.write(sys.argv[2] + "\n")
        sys.stdout.flush()
    if sys.version_info < _OLDEST:
        error = {
            "message": "{} is Python {}.{}, and homelab needs 3.9 or newer".format(sys.executable, *sys.version_info[:2]),
            "kind": "refused", "trace": None, "where": None,
            "hint": "install a newer Python on this node, make an environment with it, then edit cluster.toml: python = ...",
        }  # fmt: skip
        sys.stdout.write(json.dumps({"error": error}) + "\n")
        return 1
    from homelab.node import verbs

    return verbs.answer(sys.argv[1] if len(sys.argv) > 1 else "")


if __name__ == "__main__":
    sys.exit(main())
