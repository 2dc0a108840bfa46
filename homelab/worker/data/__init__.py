"""From a data file to the rows of tokens of a step."""
