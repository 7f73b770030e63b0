"""What Huawei's stack says and wants: pure parsers of its tools' texts, and tables of facts as data.

Parsers take text and never raise: a field that could not be read is None, `()` means looked and found none, and every
line that was not understood stands in `.unparsed`. Judgements take parsed things and tables; nothing here touches a
node, a file outside this package, or a clock.

    npu_smi        the table of `npu-smi info`, every layout      npu_smi_views, npu_smi_board   its `-t` views
    npu_smi_lists  `-l`, `-m`, `-t topo`, `watch`, `-v`           tool_errors    errors printed instead of an answer
    hccn           `hccn_tool -i N -... -g`, short answers        hccn_counters  its counters, optical module, routes
    hccn_conf      /etc/hccn.conf                                 install        version files of driver and CANN
    versions       made comparable
    chips, compatibility, variables, faults   what is known, with its source and its doubt, from tables/*.json

Views that no question of ours asks for (`-t usages`, `temp`, `power`, `proc-mem`, `topo`, `-l`, `-m`, `watch`, `-v`; of
hccn_tool speed, mtu, gateway, netdetect, vnic, lldp, hw_stats, route) are read for the simulated tools: what they print
is held against the same parsers as recordings of real boards.
"""
