"""The command line and the supervisor, on the machine of a person. Below: rooms that features share; `features/` has one folder for each."""
