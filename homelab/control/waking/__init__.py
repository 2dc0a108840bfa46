"""Machines that sleep: what is remembered of them while they are awake, and how they are woken."""
