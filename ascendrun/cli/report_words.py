"""The words of a report in English and Chinese."""

from __future__ import annotations

from typing import Mapping

WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "title": "Report", "job": "job", "attempts": "Attempts", "events": "Story", "devices": "Devices",
        "time": "Where the time went", "doubts": "Good to know", "on": "on {hosts}, {ranks} ranks",
        "from-to": "{begin} to {end}", "from": "since {begin}", "so-far": "so far", "file": "file {file}",
        "tile-effective": "effective training time", "tile-wall": "from submission to end",
        "tile-wall-live": "since submission", "tile-steps": "steps", "tile-loss": "last loss",
        "tile-tokens_per_s": "tokens/s (median)", "tile-samples_per_s": "samples/s (median)",
        "tile-step_s": "step time (median)", "tile-mfu": "MFU (median)",
        "tile-hours-npu": "NPU-hours", "tile-hours-cuda": "GPU-hours", "tile-hours-cpu": "process-hours",
        "tile-energy": "kWh of the devices",
        "tile-energy-partly": "kWh of the devices, measured {percent} % of the time",
        "unknown": "not known", "of-steps": "{steps} of {total}",
        "use-queue": "queue", "use-checks": "checks", "use-staging": "staging", "use-start-up": "start-up",
        "use-training": "training", "use-checkpoint": "checkpoint", "use-ending": "ending",
        "use-lost": "lost to failures", "sum": "together",
        "says-queue": "waited for its nodes", "says-checks": "the nodes were examined",
        "says-staging": "code was sent to the nodes",
        "says-start-up": "processes, libraries, model, until the first step",
        "says-training": "steps whose results were kept",
        "says-checkpoint": "saving, as far as the program tells",
        "says-ending": "after the last step, until all was over",
        "says-lost": "work done again or never kept, and all until the next attempt trained",
        "col-use": "use", "col-time": "time", "col-share": "share", "col-what": "what it is", "col-attempt": "attempt",
        "col-began": "began", "col-ended": "ended", "col-steps": "steps", "col-resumed": "resumed at",
        "col-kept": "training kept", "col-how": "how it ended", "col-when": "when", "col-kind": "what",
        "col-story": "story", "col-device": "device", "col-chip": "chip", "col-utilisation": "utilisation (mean)",
        "col-power": "power (mean)", "col-temperature": "temperature (highest)", "col-memory": "memory (highest)",
        "goes-on": "goes on", "more-events": "{count} more lines", "charts": "Charts",
        "x-step": "step", "x-time": "time", "line-": "value", "line-mean": "mean", "line-least": "least",
        "line-greatest": "greatest",
        "chart-loss": "Loss", "chart-grad_norm": "Gradient norm", "chart-lr": "Learning rate",
        "chart-step_s": "Step time, s", "chart-tokens_per_s": "Tokens/s", "chart-samples_per_s": "Samples/s",
        "chart-mfu": "MFU, %", "chart-utilisation": "Utilisation of the devices, %",
        "chart-power_w": "Power of a device, W", "chart-temperature_c": "Temperature of the devices, °C",
        "chart-frequency_mhz": "Clock of the devices, MHz", "chart-host_cpu": "CPU of the hosts, %",
        "no-charts": "Nothing to draw: the program wrote no metrics, and nothing was sampled.",
        "no-script": "The charts need JavaScript; everything else is here without it.",
        "made": "made by ascendrun {version} on {when}; times are local ({zone})",
        "doubt-no-steps": "An attempt told no steps: all the time that it ran counts as training, or as lost where it "
                          "failed.",
        "doubt-no-times": "The program wrote no times (at_s) into its metrics: all the time that it ran counts as "
                          "training, or as lost where it failed.",
        "doubt-no-checkpoint": "The job failed without a checkpoint that we were told of: its last attempt counts as "
                               "lost.",
        "doubt-diverged": "The program wrote a loss or gradient that is no number (lines: {lines}, the first at "
                          "step {step}).",
        "doubt-energy-partly": "The devices' power was measured for {percent} % of the time that they were held; the "
                               "kWh are of that part.",
        "doubt-energy-unknown": "The devices' power was not measured: the energy is not known.",
        "doubt-thinned": "The metrics are long: of plain steps one in {every} was read.",
    },
    "zh": {
        "title": "训练报告", "job": "作业", "attempts": "启动记录", "events": "事件", "devices": "设备",
        "time": "时间都用在哪里", "doubts": "说明", "on": "节点 {hosts}，共 {ranks} 个 rank",
        "from-to": "{begin} 至 {end}", "from": "自 {begin}", "so-far": "至今", "file": "文件 {file}",
        "tile-effective": "有效训练时间占比", "tile-wall": "从提交到结束", "tile-wall-live": "自提交以来",
        "tile-steps": "步数", "tile-loss": "最后的 loss", "tile-tokens_per_s": "tokens/s（中位数）",
        "tile-samples_per_s": "样本/s（中位数）", "tile-step_s": "单步时间（中位数）", "tile-mfu": "MFU（中位数）",
        "tile-hours-npu": "NPU 卡时", "tile-hours-cuda": "GPU 卡时", "tile-hours-cpu": "进程小时",
        "tile-energy": "设备用电 kWh", "tile-energy-partly": "设备用电 kWh（有 {percent} % 的时间有测量）",
        "unknown": "未知", "of-steps": "{steps} / {total}",
        "use-queue": "排队", "use-checks": "检查", "use-staging": "分发代码", "use-start-up": "启动",
        "use-training": "训练", "use-checkpoint": "保存检查点", "use-ending": "收尾",
        "use-lost": "故障损失", "sum": "合计",
        "says-queue": "等待节点空闲", "says-checks": "检查各节点", "says-staging": "把代码发送到各节点",
        "says-start-up": "启动进程、加载库和模型，直到第一步", "says-training": "成果得以保留的训练步",
        "says-checkpoint": "保存检查点（以程序所报为准）", "says-ending": "最后一步之后，直到全部结束",
        "says-lost": "重做的或未能保留的训练，以及恢复训练之前的全部时间",
        "col-use": "用途", "col-time": "时间", "col-share": "占比", "col-what": "含义", "col-attempt": "次数",
        "col-began": "开始", "col-ended": "结束", "col-steps": "步", "col-resumed": "续训自",
        "col-kept": "保留的训练", "col-how": "如何结束", "col-when": "时间", "col-kind": "类别",
        "col-story": "内容", "col-device": "设备", "col-chip": "芯片", "col-utilisation": "利用率（平均）",
        "col-power": "功率（平均）", "col-temperature": "温度（最高）", "col-memory": "显存（最高）",
        "goes-on": "进行中", "more-events": "另有 {count} 条", "charts": "图表",
        "x-step": "步", "x-time": "时间", "line-": "值", "line-mean": "平均", "line-least": "最小",
        "line-greatest": "最大",
        "chart-loss": "Loss", "chart-grad_norm": "梯度范数", "chart-lr": "学习率",
        "chart-step_s": "单步时间（秒）", "chart-tokens_per_s": "Tokens/s", "chart-samples_per_s": "样本/s",
        "chart-mfu": "MFU(%)", "chart-utilisation": "设备利用率（%）", "chart-power_w": "单设备功率（W）",
        "chart-temperature_c": "设备温度（°C）", "chart-frequency_mhz": "设备主频（MHz）",
        "chart-host_cpu": "主机 CPU(%)",
        "no-charts": "没有可画的内容：程序没有写指标，也没有采样数据。",
        "no-script": "图表需要 JavaScript；其余内容不需要。",
        "made": "由 ascendrun {version} 生成于 {when}；时间为本地时间（{zone}）",
        "doubt-no-steps": "有一次启动没有报告训练步：其运行时间全部计为训练；若失败则计为故障损失。",
        "doubt-no-times": "程序写的指标里没有时间（at_s）：其运行时间全部计为训练；若失败则计为故障损失。",
        "doubt-no-checkpoint": "作业失败，且没有报告过检查点：最后一次启动的训练全部计为损失。",
        "doubt-diverged": "程序在 {lines} 行中写出了非数值的 loss 或梯度，最早在第 {step} 步。",
        "doubt-energy-partly": "占用设备的时间里有 {percent} % 测得了功率；kWh 只含这一部分。",
        "doubt-energy-unknown": "没有测得设备功率，用电量未知。",
        "doubt-thinned": "指标很长：普通训练步每 {every} 行读取一行。",
    },
}


class Words:
    """One language's words; `words("use-training")`, with values where they have places for them."""

    def __init__(self, lang: str) -> None:
        self.lang = lang

    def __call__(self, key: str, **values: object) -> str:
        text = WORDS[self.lang].get(key)
        return key.partition("-")[2] if text is None else text.format(**values)
