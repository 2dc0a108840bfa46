"""Sending a run's metrics to trackers and showing its curves, on the controller alone."""
