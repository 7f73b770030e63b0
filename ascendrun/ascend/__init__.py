"""What Huawei's stack says and wants: pure parsers of its tools' texts, and tables of facts as data.

Parsers take text and never raise: a field that could not be read is None, `()` means looked and found none, and every
line that was not understood stands in `.unparsed`. Judgements take parsed things and tables; nothing here touches a
node, a file outside this package, or a clock.

    tool_errors   the errors that npu-smi and hccn_tool print instead of an answer
    npu_smi       the table of `npu-smi info`, every layout         npu_smi_views, npu_smi_lists   `-t ...`, `-l -m -v`
    hccn, hccn_counters   `hccn_tool -i N -... -g`                  hccn_conf   /etc/hccn.conf
    install       version files of driver, firmware and CANN        rank_table  RANK_TABLE_FILE: read, check, write
    chips, compatibility, variables, faults   facts with their source and their doubt, from tables/*.json
"""
