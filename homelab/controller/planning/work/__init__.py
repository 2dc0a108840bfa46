"""What the work of an attempt is, before it is divided: the job, its rows and the speeds of the machines."""
