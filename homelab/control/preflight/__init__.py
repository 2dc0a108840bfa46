"""Ask the nodes everything that the checks judge."""
