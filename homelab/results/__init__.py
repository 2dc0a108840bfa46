"""Pure: what a run has made, who holds it, and what of it is missing here."""
