// Draws charts with uPlot: for the report and for the dashboard.
"use strict";
const ascendrunCharts = (() => {
  let offset_s = 0;
  const drawn = [];

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function shorten(value) {
    const size = Math.abs(value);
    if (size >= 1e9) return +(value / 1e9).toPrecision(3) + "G";
    if (size >= 1e6) return +(value / 1e6).toPrecision(3) + "M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(3) + "k";
    if (size !== 0 && size < 1e-3) return value.toExponential(1);
    return String(+value.toPrecision(4));
  }

  const format = (value) => (value == null ? "–" : shorten(value));

  // Digits only, the same in every language, in the time zone of the machine that made the report.
  function stamp(seconds, span) {
    const at = new Date((seconds + offset_s) * 1000), two = (number) => String(number).padStart(2, "0");
    const day = two(at.getUTCMonth() + 1) + "-" + two(at.getUTCDate());
    const clock = two(at.getUTCHours()) + ":" + two(at.getUTCMinutes());
    if (span > 4 * 86400) return day;
    if (span > 86400) return day + " " + clock;
    return span > 600 ? clock : clock + ":" + two(at.getUTCSeconds());
  }

  function linesOf(chart) {
    const plain = { stroke: () => color("--line"), width: 1.5, points: { show: false }, value: (u, v) => format(v) };
    const edge = { ...plain, stroke: () => color("--edge"), width: 0.75 };
    const isSeveral = chart.lines.length > 1 && !chart.is_band;
    const several = (index) => ({ ...plain, stroke: () => color(`--line-${index}`), spanGaps: true });
    return chart.lines.map((line, index) => ({
      ...(isSeveral ? several(index % 8) : chart.is_band && index ? edge : plain),
      label: chart.labels[index],
      points: { show: line.length < 40, size: 4 },
    }));
  }

  function draw(chart, place) {
    const axis = {
      stroke: () => color("--quiet"), grid: { stroke: () => color("--grid"), width: 1 }, ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const isTime = chart.x === "time";
    const alone = chart.xs.length === 1 ? [chart.xs[0] - (isTime ? 30 : 1), chart.xs[0] + (isTime ? 30 : 1)] : null;
    const xs = isTime
      ? { ...axis, size: 30, values: (u, splits) => splits.map((at) => stamp(at, u.scales.x.max - u.scales.x.min)) }
      : { ...axis, size: 30, values: (u, splits) => splits.map((step) => (Number.isInteger(step) ? shorten(step) : "")) };
    // A single point has no width: it gets empty neighbours.
    const padded = (values, ends) => (alone ? [ends[0], ...values, ends[1]] : values);
    const plot = new uPlot({
      width: place.clientWidth, height: 200, padding: [8, 18, 0, 0],
      tzDate: (at) => uPlot.tzDate(new Date((at + offset_s) * 1000), "Etc/UTC"),
      scales: { x: { time: isTime }, y: chart.is_load ? { range: (u, low, high) => [0, Math.max(100, high)] } : {} },
      axes: [xs, { ...axis, size: 56, values: (u, splits) => splits.map(shorten) }],
      series: [
        { label: chart.x_label, value: (u, at) => (at == null ? "–" : isTime ? stamp(at, 2 * 86400) : String(at)) },
        ...linesOf(chart),
      ],
      bands: chart.is_band ? [{ series: [3, 2], fill: () => color("--band") }] : [],
      legend: { live: true },
      cursor: { y: false, sync: isTime ? { key: "time" } : { key: "step" } },
    }, [padded(chart.xs, alone), ...chart.lines.map((line) => padded(line, [null, null]))], place);
    drawn.push([plot, place]);
    return plot;
  }

  const fit = () => drawn.forEach(([plot, place]) => plot.setSize({ width: place.clientWidth, height: 200 }));
  window.addEventListener("resize", fit);
  window.addEventListener("beforeprint", fit);
  window.addEventListener("afterprint", fit);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    window.matchMedia(query).addEventListener("change", () => drawn.forEach(([plot]) => plot.redraw(false, true)));
  }
  return { draw, drawn, useOffset: (seconds) => { offset_s = seconds; } };
})();
