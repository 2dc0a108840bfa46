"""How one training is divided over ranks: the strategies, the choice between them, and which rank computes how much."""
