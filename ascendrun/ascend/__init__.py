"""What Huawei's tools print and what is known of the hardware: pure parsers of texts, and tables of facts as data.

Parsers accept text and never raise: a field that cannot be read is None, `()` means none was found, and every line that
was not understood is in `.unparsed`. Nothing here accesses a node, a file outside this package, or a clock.

    npu_smi        the table of `npu-smi info`, every layout      npu_smi_views, npu_smi_board   its `-t` views
    hccn           `hccn_tool -i N -... -g`, short answers        hccn_counters  its counters and optical module
    hccn_conf      /etc/hccn.conf                                 install        version files of driver and CANN
    tool_errors    errors printed instead of an answer            versions       versions made comparable
    signatures     known errors in logs                           peer_messages  lines about other ranks
    chips, compatibility, variables, faults   what is known, with its source and its doubt, from tables/*.json
"""
