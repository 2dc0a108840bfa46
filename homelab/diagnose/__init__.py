"""From an exit code and a log to a cause, a node and the command that mends it. Pure: nothing is fetched here."""
