// Keeps the parts of a page up to date, and shows when they no longer are.
"use strict";
(() => {
  const STALE_MS = 15000, AGAIN_MS = 2000;
  const feed = document.body.dataset.live;
  let beatAt = Date.now();

  function listen() {
    const source = new EventSource(feed);
    source.addEventListener("parts", (event) => {
      const isAtEnd = document.getElementById("live_lines") && innerHeight + scrollY > document.body.scrollHeight - 40;
      for (const [id, html] of JSON.parse(event.data)) {
        const place = document.getElementById(id);
        if (place) htmx.swap(place, html, { swapStyle: "innerHTML" });
      }
      if (isAtEnd) scrollTo(0, document.body.scrollHeight);
      draw();
    });
    source.addEventListener("beat", () => { beatAt = Date.now(); show(); });
    source.addEventListener("error", () => {
      if (source.readyState !== EventSource.CLOSED) return;
      setTimeout(listen, AGAIN_MS);
    });
  }

  function show() {
    const isStale = Date.now() - beatAt > STALE_MS;
    document.body.classList.toggle("is-stale", isStale);
    document.getElementById("stale").hidden = !isStale;
  }

  // The data of curves and heat maps comes in attributes of elements that are swapped.
  const curves = [];
  const smoothed = (line) => {
    let mean = null;
    return line.map((value) => (value == null ? null : (mean = mean == null ? value : 0.9 * mean + 0.1 * value)));
  };

  function drawCurves(source) {
    const { charts, offset_s } = JSON.parse(source.dataset.charts), titles = JSON.parse(source.dataset.titles);
    const place = document.getElementById("curves"), isSmooth = document.getElementById("smooth").checked;
    ascendrunCharts.useOffset(offset_s);
    charts.forEach((chart, index) => {
      const lines = isSmooth && !chart.is_band ? chart.lines.map(smoothed) : chart.lines;
      const key = titles[index] + chart.labels.join(), known = curves[index];
      if (known && known.key === key && chart.xs.length > 1) {
        const { min, max } = known.plot.scales.x, ends = known.ends;
        known.plot.setData([chart.xs, ...lines], min <= ends[0] && max >= ends[1]); // a zoomed chart stays zoomed
        known.ends = [chart.xs[0], chart.xs[chart.xs.length - 1]];
        return;
      }
      if (known) { known.plot.destroy(); known.box.remove(); }
      const box = document.createElement("section"), title = document.createElement("h2"), area = document.createElement("div");
      title.textContent = titles[index];
      area.className = "chart";
      box.append(title, area);
      place.insertBefore(box, place.children[index] || null);
      const plot = ascendrunCharts.draw({ ...chart, lines }, area);
      curves[index] = { key, box, plot: plot, ends: [chart.xs[0], chart.xs[chart.xs.length - 1]] };
      if (chart.xs.length < 2) curves[index].key = "";
    });
  }

  const share = (value, low, high) => Math.max(0, Math.min(1, (value - low) / (high - low)));
  const COLORS = {
    load: (value) => `hsl(152 56% ${92 - 52 * share(value, 0, 100)}%)`,
    step: (value) => `hsl(${120 - 120 * share(value, 100, 130)} 55% 48%)`,
  };

  function drawHeat(source) {
    const data = JSON.parse(source.dataset.heat);
    ["load", "step"].forEach((name, index) => {
      const canvas = source.querySelectorAll("canvas")[index], rows = data[name];
      const height = Math.max(2, Math.min(14, Math.floor(480 / rows.length)));
      canvas.width = rows[0].length * 8;
      canvas.height = rows.length * height;
      canvas.style.height = `${canvas.height}px`;
      const ink = canvas.getContext("2d");
      rows.forEach((row, y) => row.forEach((value, x) => {
        if (value == null) return;
        ink.fillStyle = COLORS[name](value);
        ink.fillRect(x * 8, y * height, 8, height > 4 ? height - 1 : height);
      }));
      canvas.onmousemove = (event) => {
        const x = Math.floor((event.offsetX / canvas.clientWidth) * rows[0].length);
        const y = Math.floor((event.offsetY / canvas.clientHeight) * rows.length);
        const value = rows[y] && rows[y][x], at = new Date((data.since_s + x * data.column_s) * 1000);
        canvas.title = `rank ${data.ranks[y]} · ${at.toLocaleTimeString()} · ${value == null ? "–" : value + "%"}`;
      };
    });
    source.dataset.drawn = "yes";
  }

  function draw() {
    for (const source of document.querySelectorAll("[data-charts]:not([data-drawn])")) {
      drawCurves(source);
      source.dataset.drawn = "yes";
    }
    document.querySelectorAll("[data-heat]:not([data-drawn])").forEach(drawHeat);
  }

  // Forms and buttons that change something ask first.
  document.addEventListener("submit", (event) => {
    const question = (event.submitter && event.submitter.dataset.confirm) || event.target.dataset.confirm;
    if (question && !confirm(question)) event.preventDefault();
  });

  draw();
  const smooth = document.getElementById("smooth");
  if (smooth) smooth.addEventListener("change", () => drawCurves(document.querySelector("[data-charts]")));

  if (feed) {
    listen();
    setInterval(show, 1000);
  }
})();
