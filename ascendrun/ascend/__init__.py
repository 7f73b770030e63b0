"""Pure parsers of the output of Huawei's tools, and tables of hardware facts as data.

Parsers accept text and never raise: an unreadable field is None, `()` means none was found, and `.unparsed` has every
line that was not understood. No module here accesses a node, a file outside this package, or a clock.

    npu_smi        the table of `npu-smi info`, all layouts       npu_smi_views, npu_smi_board   its `-t` views
    hccn           `hccn_tool -i N -... -g`, short output         hccn_counters  its counters and optical module
    hccn_conf      /etc/hccn.conf                                 install        version files of driver and CANN
    tool_errors    errors printed instead of a result             versions       comparable versions
    signatures     known errors in logs                           peer_messages  lines about other ranks
    chips, compatibility, variables, faults   facts with their sources and caveats, from tables/*.json
"""
