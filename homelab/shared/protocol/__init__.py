"""What controller, node and worker agree on, each thing once. Standard library only; shipped to the nodes."""
