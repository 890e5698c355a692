"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colors = () => {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(["ink", "soft", "line", "page"].map((name) => [name, style.getPropertyValue("--" + name)]));
  };
  // Plotly reads a few tags in its texts; names of ours are never meant as such.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (number) => (number === null ? "diverged" : Number(number.toPrecision(4)).toString());
  const finite = (numbers) => numbers.filter((number) => number !== null);

  /** Stretches of a curve without a gap, as pairs [first, last + 1]. */
  function stretches(values) {
    const found = [];
    let start = null;
    values.concat(null).forEach((value, place) => {
      if (value !== null && start === null) start = place;
      if (value === null && start !== null) {
        found.push([start, place]);
        start = null;
      }
    });
    return found;
  }

  /** Where a band has no finite edge it is drawn to the edge of what is seen. */
  function edges(curves, log) {
    const all = curves.flatMap((curve) => finite(curve.median.concat(curve.low, curve.high)));
    const seen = log ? all.filter((value) => value > 0) : all;
    const bottom = seen.reduce((a, b) => Math.min(a, b), Infinity);
    const top = seen.reduce((a, b) => Math.max(a, b), -Infinity);
    return {
      low: (value) => (value === null ? bottom : Math.max(value, bottom)),
      high: (value) => (value === null ? top : Math.max(value, bottom)),
    };
  }

  function band(curve, look, edge) {
    const x = [];
    const y = [];
    for (const [first, last] of stretches(curve.median)) {
      const xs = curve.x.slice(first, last);
      x.push(...xs, ...xs.slice().reverse(), null);
      y.push(...curve.high.slice(first, last).map(edge.high));
      y.push(...curve.low.slice(first, last).map(edge.low).reverse(), null);
    }
    return {
      x, y, type: "scatter", mode: "lines", fill: "toself", fillcolor: look.color + "26", line: { width: 0 },
      hoverinfo: "skip", showlegend: false,
    };
  }

  function line(section, curve, look, metric, axis) {
    const setting = section.settings[curve.solver].map(plain);
    const text = curve.x.map((x, place) =>
      [
        `<b>${plain(look.name)}</b>`,
        `${axis} ${short(x)}`,
        `${plain(metric.label)} ${short(curve.median[place])}`,
        `20–80 %: ${short(curve.low[place])} to ${short(curve.high[place])}`,
        ...setting,
      ].join("<br>"));
    return {
      x: curve.x, y: curve.median, type: "scatter", mode: curve.x.length > 1 ? "lines" : "markers",
      name: plain(look.name), line: { color: look.color, dash: look.dash, width: 2.25 },
      marker: { color: look.color, size: 8 }, text, hoverinfo: "text", showlegend: false,
    };
  }

  function axisLayout(title, log, shades, format) {
    return {
      title: { text: plain(title), standoff: 10 }, type: log ? "log" : "linear", automargin: true, gridcolor: shades.line,
      linecolor: shades.line, zeroline: false, exponentformat: log ? "power" : format, minexponent: 4,
    };
  }

  const layoutIsNarrow = () => window.matchMedia("(max-width: 40rem)").matches;

  function layout(metric, axis, scales, shades) {
    const narrow = layoutIsNarrow();
    return {
      autosize: true, margin: { l: 56, r: 12, t: narrow ? 12 : 34, b: 48 }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", font: { color: shades.ink, size: narrow ? 12 : 13, family: getComputedStyle(document.body).fontFamily },
      hovermode: "closest", hoverlabel: { align: "left", bgcolor: shades.page, font: { color: shades.ink } }, dragmode: narrow ? false : "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: shades.soft, activecolor: shades.ink },
      xaxis: axisLayout(axis, scales.x, shades, "SI"), yaxis: axisLayout(metric.label, scales.y, shades, "power"),
    };
  }

  class Plot {
    constructor(root, section) {
      this.section = section;
      this.hidden = new Set();
      this.target = root.querySelector(".plot");
      this.controls = root.querySelector(".controls");
      this.buttons = root.querySelectorAll(".legend button");
      this.missing = root.querySelector(".missing");
      this.controls.addEventListener("change", (event) => this.changed(event.target.name));
      this.buttons.forEach((button) => button.addEventListener("click", () => this.toggle(button)));
      this.suggestScale();
      this.draw();
    }

    field(name) {
      return this.controls.elements.namedItem(name);
    }

    metric() {
      return this.section.metrics[Number(this.field("metric").value)];
    }

    changed(name) {
      if (name === "metric") this.suggestScale();
      this.draw();
    }

    suggestScale() {
      this.field("logy").checked = this.metric().log;
    }

    toggle(button) {
      const solver = Number(button.value);
      if (!this.hidden.delete(solver)) this.hidden.add(solver);
      button.setAttribute("aria-pressed", String(!this.hidden.has(solver)));
      this.draw();
    }

    sayMissing(known, metric, axis) {
      const names = [...this.buttons].filter((button) => !known.has(Number(button.value))).map((button) => button.innerText);
      this.missing.textContent = names.length ? `No finite curve of ${metric} against ${axis}: ${names.join(", ")}.` : "";
    }

    draw() {
      const metric = this.metric();
      const axis = this.field("axis").value;
      const label = data.axes[axis];
      const scales = { x: this.field("logx").checked, y: this.field("logy").checked };
      const known = this.section.curves.filter((curve) => curve.metric === metric.name && curve.axis === axis);
      const shown = known.filter((curve) => !this.hidden.has(curve.solver));
      this.sayMissing(new Set(known.map((curve) => curve.solver)), metric.label, label);
      const edge = edges(shown, scales.y);
      const bands = shown.map((curve) => band(curve, data.solvers[curve.solver], edge));
      const lines = shown.map((curve) => line(this.section, curve, data.solvers[curve.solver], metric, label));
      const config = {
        responsive: true, displayModeBar: !layoutIsNarrow(), displaylogo: false, modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
      };
      Plotly.react(this.target, [...bands, ...lines], layout(metric, label, scales, colors()), config);
    }
  }

  const plots = data.sections
    .filter((section) => section.curves.length)
    .map((section) => new Plot(document.getElementById(section.id), section));
  const redraw = () => plots.forEach((plot) => plot.draw());
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  window.matchMedia("(max-width: 40rem)").addEventListener("change", redraw);
})();
