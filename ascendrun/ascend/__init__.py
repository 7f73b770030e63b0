"""Pure parsers of the output of Huawei's tools, and tables of hardware facts as data.

Parsers accept text and never raise: an unreadable field is None, `()` means none was found, and `.unparsed` has every
line that was not understood. No module here accesses a node, a file outside this package, or a clock.

    npu_smi        the table of `npu-smi info`, all layouts       npu_smi_views  its `-t` views
    hccn           `hccn_tool -i N -... -g`                       install        version files, /etc/hccn.conf
    reading        lines, errors printed instead of a result
    signatures     known errors in logs                           peer_messages  lines about other ranks
    compatibility, devices, variables   facts with their sources and caveats, from tables/*.json
"""
