"""Go on after a failure: examine, stop what is left, resume."""
