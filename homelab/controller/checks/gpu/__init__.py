"""Checks of the cards, their driver and the torch that uses them."""
