"""What can be wrong with a machine before a run: the misconfigurations that preflight must find, each really injected into a lab.

(What can happen to a node during a run is in `homelab.lab.faults`.)
"""
