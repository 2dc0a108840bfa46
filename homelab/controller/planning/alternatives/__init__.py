"""The same training planned otherwise: with another batch, on other machines, on more of them."""
