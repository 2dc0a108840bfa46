"""From a plan to the commands that start it."""
