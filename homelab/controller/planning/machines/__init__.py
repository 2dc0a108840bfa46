"""The machines that take part, their cards and their addresses."""
