"""What is learned from pairs of answers: for each objective, the loss of a pair as a function of a few numbers."""
