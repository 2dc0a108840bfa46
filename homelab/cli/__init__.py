"""Typer: parse, load, call, print, exit code. One file per command; no decisions here.

Command modules import what they need inside their functions: `homelab --help` must answer at once.
"""
