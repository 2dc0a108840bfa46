"""What is started on the nodes: the program, the variables of its ranks and the build of torch."""
