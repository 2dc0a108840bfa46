"""Words and numbers as a person reads them: units, redacted secrets, nothing that a terminal obeys. Pure."""
