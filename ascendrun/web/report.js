// Draws the charts of the report. Everything else on the page is plain HTML.
"use strict";
(() => {
  const { charts, offset_s } = JSON.parse(document.getElementById("charts").textContent);
  ascendrunCharts.useOffset(offset_s);
  charts.forEach((chart, index) => ascendrunCharts.draw(chart, document.getElementById("chart-" + index)));
  document.documentElement.dataset.drawn = String(ascendrunCharts.drawn.length);
})();
