// Keeps the parts of a page up to date, and shows when they no longer are.
"use strict";
(() => {
  const STALE_MS = 15000, AGAIN_MS = 2000;
  const feed = document.body.dataset.live;
  let beatAt = Date.now();

  function listen() {
    const source = new EventSource(feed);
    source.addEventListener("part", (event) => {
      const [id, html] = JSON.parse(event.data), place = document.getElementById(id);
      if (place) htmx.swap(place, html, { swapStyle: "innerHTML" });
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

  if (feed) {
    listen();
    setInterval(show, 1000);
  }
})();
