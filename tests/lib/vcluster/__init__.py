"""The virtual cluster: real SSH hosts on one Linux machine, made of namespaces, with faults on demand.

`cluster.VirtualCluster` is the entry point. Nothing is imported here, so that the boot process stays small.
"""
