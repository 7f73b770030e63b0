"""The words of a report in English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping

WORDS: Mapping[str, tuple[str, str]] = {
    "title": ("Report", "训练报告"),
    "job": ("job", "作业"),
    "attempts": ("Attempts", "启动记录"),
    "events": ("Story", "事件"),
    "devices": ("Devices", "设备"),
    "time": ("Where the time went", "时间都用在哪里"),
    "doubts": ("Good to know", "说明"),
    "on": ("on {hosts}, {ranks} ranks", "节点 {hosts}，共 {ranks} 个 rank"),
    "from-to": ("{begin} to {end}", "{begin} 至 {end}"),
    "from": ("since {begin}", "自 {begin}"),
    "so-far": ("so far", "至今"),
    "file": ("file {file}", "文件 {file}"),
    "tile-effective": ("effective training time", "有效训练时间占比"),
    "tile-wall": ("from submission to end", "从提交到结束"),
    "tile-wall-live": ("since submission", "自提交以来"),
    "tile-steps": ("steps", "步数"),
    "tile-loss": ("last loss", "最后的 loss"),
    "tile-tokens_per_s": ("tokens/s (median)", "tokens/s（中位数）"),
    "tile-samples_per_s": ("samples/s (median)", "样本/s（中位数）"),
    "tile-step_s": ("step time (median)", "单步时间（中位数）"),
    "tile-mfu": ("MFU (median)", "MFU（中位数）"),
    "tile-hours-npu": ("NPU-hours", "NPU 卡时"),
    "tile-hours-cuda": ("GPU-hours", "GPU 卡时"),
    "tile-hours-cpu": ("process-hours", "进程小时"),
    "tile-energy": ("kWh of the devices", "设备用电 kWh"),
    "tile-energy-partly": (
        "kWh of the devices, measured {percent} % of the time",
        "设备用电 kWh（有 {percent} % 的时间有测量）",
    ),
    "unknown": ("not known", "未知"),
    "of-steps": ("{steps} of {total}", "{steps} / {total}"),
    "use-queue": ("queue", "排队"),
    "use-checks": ("checks", "检查"),
    "use-staging": ("staging", "分发代码"),
    "use-start-up": ("start-up", "启动"),
    "use-training": ("training", "训练"),
    "use-checkpoint": ("checkpoint", "保存检查点"),
    "use-ending": ("ending", "收尾"),
    "use-lost": ("lost to failures", "故障损失"),
    "sum": ("together", "合计"),
    "says-queue": ("waited for its nodes", "等待节点空闲"),
    "says-checks": ("the nodes were examined", "检查各节点"),
    "says-staging": ("code was sent to the nodes", "把代码发送到各节点"),
    "says-start-up": ("processes, libraries, model, until the first step", "启动进程、加载库和模型，直到第一步"),
    "says-training": ("steps whose results were kept", "成果得以保留的训练步"),
    "says-checkpoint": ("saving, as far as the program tells", "保存检查点（以程序所报为准）"),
    "says-ending": ("after the last step, until all was over", "最后一步之后，直到全部结束"),
    "says-lost": (
        "work done again or never kept, and all until the next attempt trained",
        "重做的或未能保留的训练，以及恢复训练之前的全部时间",
    ),
    "col-use": ("use", "用途"),
    "col-time": ("time", "时间"),
    "col-share": ("share", "占比"),
    "col-what": ("what it is", "含义"),
    "col-attempt": ("attempt", "次数"),
    "col-began": ("began", "开始"),
    "col-ended": ("ended", "结束"),
    "col-steps": ("steps", "步"),
    "col-resumed": ("resumed at", "续训自"),
    "col-kept": ("training kept", "保留的训练"),
    "col-how": ("how it ended", "如何结束"),
    "col-when": ("when", "时间"),
    "col-kind": ("what", "类别"),
    "col-story": ("story", "内容"),
    "col-device": ("device", "设备"),
    "col-chip": ("chip", "芯片"),
    "col-utilisation": ("utilisation (mean)", "利用率（平均）"),
    "col-power": ("power (mean)", "功率（平均）"),
    "col-temperature": ("temperature (highest)", "温度（最高）"),
    "col-memory": ("memory (highest)", "显存（最高）"),
    "goes-on": ("goes on", "进行中"),
    "more-events": ("{count} more lines", "另有 {count} 条"),
    "charts": ("Charts", "图表"),
    "x-step": ("step", "步"),
    "x-time": ("time", "时间"),
    "line-": ("value", "值"),
    "line-mean": ("mean", "平均"),
    "line-least": ("least", "最小"),
    "line-greatest": ("greatest", "最大"),
    "chart-loss": ("Loss", "Loss"),
    "chart-grad_norm": ("Gradient norm", "梯度范数"),
    "chart-lr": ("Learning rate", "学习率"),
    "chart-step_s": ("Step time, s", "单步时间（秒）"),
    "chart-tokens_per_s": ("Tokens/s", "Tokens/s"),
    "chart-samples_per_s": ("Samples/s", "样本/s"),
    "chart-mfu": ("MFU, %", "MFU(%)"),
    "chart-utilisation": ("Utilisation of the devices, %", "设备利用率（%）"),
    "chart-power_w": ("Power of a device, W", "单设备功率（W）"),
    "chart-temperature_c": ("Temperature of the devices, °C", "设备温度（°C）"),
    "chart-frequency_mhz": ("Clock of the devices, MHz", "设备主频（MHz）"),
    "chart-host_cpu": ("CPU of the hosts, %", "主机 CPU(%)"),
    "no-charts": (
        "Nothing to draw: the program wrote no metrics, and nothing was sampled.",
        "没有可画的内容：程序没有写指标，也没有采样数据。",
    ),
    "no-script": (
        "The charts need JavaScript; everything else is here without it.",
        "图表需要 JavaScript；其余内容不需要。",
    ),
    "made": (
        "made by ascendrun {version} on {when}; times are local ({zone})",
        "由 ascendrun {version} 生成于 {when}；时间为本地时间（{zone}）",
    ),
    "doubt-no-steps": (
        "An attempt told no steps: all the time that it ran counts as training, or as lost where it failed.",
        "有一次启动没有报告训练步：其运行时间全部计为训练；若失败则计为故障损失。",
    ),
    "doubt-no-times": (
        "The program wrote no times (at_s) into its metrics: all the time that it ran counts as training, or as lost "
        "where it failed.",
        "程序写的指标里没有时间（at_s）：其运行时间全部计为训练；若失败则计为故障损失。",
    ),
    "doubt-no-checkpoint": (
        "The job failed without a checkpoint that we were told of: its last attempt counts as lost.",
        "作业失败，且没有报告过检查点：最后一次启动的训练全部计为损失。",
    ),
    "doubt-diverged": (
        "The program wrote a loss or gradient that is no number (lines: {lines}, the first at step {step}).",
        "程序在 {lines} 行中写出了非数值的 loss 或梯度，最早在第 {step} 步。",
    ),
    "doubt-energy-partly": (
        "The devices' power was measured for {percent} % of the time that they were held; the kWh are of that part.",
        "占用设备的时间里有 {percent} % 测得了功率；kWh 只含这一部分。",
    ),
    "doubt-energy-unknown": (
        "The devices' power was not measured: the energy is not known.",
        "没有测得设备功率，用电量未知。",
    ),
    "doubt-thinned": (
        "The metrics are long: of plain steps one in {every} was read.",
        "指标很长：普通训练步每 {every} 行读取一行。",
    ),
}


class Words:
    """One language's words; `words("use-training")`, with values where they have places for them."""

    def __init__(self, lang: str) -> None:
        self.lang = lang

    def __call__(self, key: str, **values: object) -> str:
        """A key without words shows itself without its kind: `line-npu01` is the line of a host."""
        pair = WORDS.get(key)
        return key.partition("-")[2] if pair is None else pair[self.lang == "zh"].format(**values)
