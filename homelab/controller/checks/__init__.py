"""Checks: one probe plus one pure judge each; every finding is ok, warn or fail and ends in the command that fixes it."""
