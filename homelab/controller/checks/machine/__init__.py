"""Checks of each machine: login, clock, Python, power, disk, memory."""
