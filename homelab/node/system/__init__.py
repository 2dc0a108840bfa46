"""This machine: processes, load, ports, firewall."""
