"""Words, errors, hints and tables of cards: what every room of the controller may use."""
