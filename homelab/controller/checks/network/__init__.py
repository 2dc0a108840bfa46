"""Checks of the network between the nodes."""
