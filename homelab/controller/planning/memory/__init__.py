"""What a training holds in memory, and what makes it fit."""
