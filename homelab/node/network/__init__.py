"""Tests between two nodes: connections, throughput, packet sizes and loss."""
