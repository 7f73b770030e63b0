"""What Huawei's stack says and wants: pure parsers of its tools' texts, and tables of facts as data.

Parsers take text and never raise: a field that could not be read is None, `()` means looked and found none, and every
line that was not understood stands in `.unparsed`. Judgements take parsed things and tables; nothing here touches a
node, a file outside this package, or a clock.

    npu_smi        the table of `npu-smi info`, every layout      npu_smi_views, npu_smi_board   its `-t` views
    npu_smi_lists  `-l`, `-m`, `-t topo`, `watch`, `-v`           tool_errors    errors printed instead of an answer
    hccn           `hccn_tool -i N -... -g`, short answers        hccn_counters  its counters, optical module, routes
    hccn_conf      /etc/hccn.conf                                 install        version files of driver and CANN
    rank_table     RANK_TABLE_FILE: read, check, write            versions       versions made comparable
    chips, compatibility, variables, faults   what is known, with its source and its doubt, from tables/*.json
"""
