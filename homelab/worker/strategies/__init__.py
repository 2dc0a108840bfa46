"""How a training is spread over the ranks: a folder for each strategy, with all that only it needs."""
