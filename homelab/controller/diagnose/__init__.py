"""From an exit code and a log to a cause, a node and the command that fixes it. Pure: no I/O."""
