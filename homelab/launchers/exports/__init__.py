"""The same training as a job of a scheduler: from one neutral description to the file that each scheduler takes."""
