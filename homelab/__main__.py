"""`python -m homelab`: the same as the `homelab` command."""

from homelab.cli.main import main

if __name__ == "__main__":
    main()
