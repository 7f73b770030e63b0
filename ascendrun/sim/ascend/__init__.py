"""Simulated Ascend nodes: npu-smi, hccn_tool and the driver's and CANN's files, from a scenario, with faults on demand.

scenario    what a node is: Scenario, load_scenario        tree     install_tree(root, scenario); set_fault, clear_fault
tool/       what runs on the node: standard library only, Python 3.7 and newer, copied there
"""
