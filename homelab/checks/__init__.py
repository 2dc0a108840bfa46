"""Checks: one probe plus one pure judge; each finding is ok, warn or fail and ends in the command that mends it."""
