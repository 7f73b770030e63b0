"""Counters and amounts of NPUs beyond their metrics, of which the newest are kept."""

from __future__ import annotations

from collections.abc import Mapping

DETAIL_NAMES: Mapping[str, tuple[str, str]] = {
    "npu_chip_info_used_memory": ("ddr_used_mb", "Memory other than HBM in use, MB"),
    "npu_chip_info_total_memory": ("ddr_total_mb", "Memory other than HBM in total, MB"),
    "npu_chip_info_hbm_utilization": ("hbm_percent", "HBM in use, percent"),
    "npu_chip_info_hbm_ecc_single_bit_error_cnt": ("hbm_single_bit", "HBM errors of one bit since the driver started"),
    "npu_chip_info_hbm_ecc_double_bit_error_cnt": ("hbm_double_bit", "HBM errors of two bits since the driver started"),
    "npu_chip_info_hbm_ecc_total_single_bit_error_cnt": ("hbm_single_bit_total", "HBM errors of one bit ever"),
    "npu_chip_info_hbm_ecc_total_double_bit_error_cnt": ("hbm_double_bit_total", "HBM errors of two bits ever"),
    "npu_chip_info_hbm_ecc_single_bit_isolated_pages_cnt": (
        "hbm_single_bit_pages",
        "HBM pages out of use for errors of one bit",
    ),
    "npu_chip_info_hbm_ecc_double_bit_isolated_pages_cnt": (
        "hbm_double_bit_pages",
        "HBM pages out of use for errors of two bits",
    ),
    "npu_chip_link_up_num": ("link_ups", "Number of times the NPU's network port became up"),
    "npu_chip_mac_rx_pause_num": ("mac_rx_mac_pause_num", "Pause frames received"),
    "npu_chip_mac_tx_pause_num": ("mac_tx_mac_pause_num", "Pause frames sent"),
    "npu_chip_mac_rx_pfc_pkt_num": ("mac_rx_pfc_pkt_num", "PFC frames received"),
    "npu_chip_mac_tx_pfc_pkt_num": ("mac_tx_pfc_pkt_num", "PFC frames sent"),
    "npu_chip_mac_rx_bad_pkt_num": ("mac_rx_bad_pkt_num", "Bad packets received"),
    "npu_chip_mac_tx_bad_pkt_num": ("mac_tx_bad_pkt_num", "Bad packets sent"),
    "npu_chip_mac_rx_bad_oct_num": ("mac_rx_bad_oct_num", "Bytes of bad packets received"),
    "npu_chip_mac_tx_bad_oct_num": ("mac_tx_bad_oct_num", "Bytes of bad packets sent"),
    "npu_chip_info_rx_fcs_num": ("mac_rx_fcs_err_pkt_num", "Packets received with a wrong checksum"),
    "npu_chip_info_rx_ecn_num": ("roce_ecn_db_num", "RoCE packets received with a congestion mark"),
    "npu_chip_roce_rx_all_pkt_num": ("roce_rx_all_pkt_num", "RoCE packets received"),
    "npu_chip_roce_tx_all_pkt_num": ("roce_tx_all_pkt_num", "RoCE packets sent"),
    "npu_chip_roce_rx_err_pkt_num": ("roce_rx_err_pkt_num", "Bad RoCE packets received"),
    "npu_chip_roce_tx_err_pkt_num": ("roce_tx_err_pkt_num", "Bad RoCE packets sent"),
    "npu_chip_roce_rx_cnp_pkt_num": ("roce_rx_cnp_pkt_num", "Congestion notices received"),
    "npu_chip_roce_tx_cnp_pkt_num": ("roce_tx_cnp_pkt_num", "Congestion notices sent"),
    "npu_chip_roce_unexpected_ack_num": ("roce_unexpected_ack_num", "Unexpected RoCE acknowledgements"),
    "npu_chip_roce_out_of_order_num": ("roce_out_of_order_num", "RoCE packets out of order or lost"),
    "npu_chip_roce_verification_err_num": ("roce_verification_err_num", "RoCE packets that failed verification"),
    "npu_chip_roce_qp_status_err_num": ("roce_qp_status_err_num", "RoCE packets to a queue pair in a wrong state"),
    "npu_chip_roce_new_pkt_rty_num": ("roce_new_pkt_rty_num", "RoCE packets sent again"),
}
"""npu-exporter's names of counters, each with the name in the tool and its meaning. All are gauges there."""
PORT_COUNTERS = tuple(name for name, _ in DETAIL_NAMES.values() if name.startswith(("mac_", "roce_")))
"""Names in the tool of the counters of a port."""
