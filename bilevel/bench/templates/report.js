"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colors = () => {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(["ink", "soft", "line", "page", "bad", "bad-page", "best", "worst", "on-best"].map((name) => [name, style.getPropertyValue("--" + name)]));
  };
  // What was chosen is kept in the fragment of the address, so that a link shows what its sender saw.
  const view = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  function remember(key, values) {
    view.delete(key);
    values.forEach((value) => view.append(key, value));
    history.replaceState(null, "", "#" + view);
  }

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
      x, y, type: "scatter", mode: "lines", fill: "toself", fillcolor: look.color + "1c", line: { width: 0 },
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

  /** A tick at 1, 2 and 5 of each decade where there are few; all nine would touch. */
  function ticks(values) {
    const seen = finite(values.flat()).filter((value) => value > 0);
    const decades = Math.log10(seen.reduce((a, b) => Math.max(a, b), 0) / seen.reduce((a, b) => Math.min(a, b), Infinity));
    return decades > 0.5 && decades < 4 ? { dtick: "D2" } : {};
  }

  function axisLayout(title, log, shades, format, values) {
    return {
      ...(log ? ticks(values) : {}),
      title: { text: plain(title), standoff: 10 }, type: log ? "log" : "linear", automargin: true, gridcolor: shades.line,
      linecolor: shades.line, zeroline: false, exponentformat: log ? "power" : format, minexponent: 4,
    };
  }

  const transparent = "rgba(0,0,0,0)";
  const family = () => getComputedStyle(document.body).fontFamily;
  const layoutIsNarrow = () => window.matchMedia("(max-width: 40rem)").matches;

  function layout(metric, axis, scales, shades, shown) {
    const narrow = layoutIsNarrow();
    return {
      autosize: true, margin: { l: 56, r: 12, t: narrow ? 12 : 34, b: 48 }, paper_bgcolor: transparent,
      plot_bgcolor: transparent, font: { color: shades.ink, size: narrow ? 12 : 13, family: family() },
      hovermode: "closest", hoverlabel: { align: "left", bgcolor: shades.page, font: { color: shades.ink } }, dragmode: narrow ? false : "zoom",
      modebar: { bgcolor: transparent, color: shades.soft, activecolor: shades.ink },
      xaxis: axisLayout(axis, scales.x, shades, "SI", shown.map((curve) => curve.x)),
      yaxis: axisLayout(metric.label, scales.y, shades, "power", shown.map((curve) => curve.median)),
    };
  }

  class Plot {
    constructor(root, section) {
      this.section = section;
      this.target = root.querySelector(".plot");
      this.controls = root.querySelector(".controls");
      this.buttons = root.querySelectorAll(".legend button");
      this.missing = root.querySelector(".missing");
      this.controls.addEventListener("change", (event) => this.changed(event.target.name));
      this.buttons.forEach((button) => button.addEventListener("click", () => this.toggle(button)));
      this.recall();
      this.draw();
    }

    key(name) {
      return this.section.id + "." + name;
    }

    field(name) {
      return this.controls.elements.namedItem(name);
    }

    metric() {
      return this.section.metrics.find((one) => one.name === this.field("metric").value);
    }

    /** Take what the address says; what it names may be gone. */
    recall() {
      for (const name of ["metric", "axis"]) {
        const wanted = view.get(this.key(name));
        if ([...this.field(name).options].some((option) => option.value === wanted)) this.field(name).value = wanted;
      }
      this.suggestScale();
      for (const name of ["logx", "logy"]) {
        if (view.has(this.key(name))) this.field(name).checked = view.get(this.key(name)) === "1";
      }
      const names = new Set(view.getAll(this.key("hide")));
      this.hidden = new Set(data.solvers.filter((solver) => names.has(solver.name)).map((solver) => solver.place));
      this.buttons.forEach((button) => button.setAttribute("aria-pressed", String(!this.hidden.has(Number(button.value)))));
    }

    changed(name) {
      const field = this.field(name);
      remember(this.key(name), [field.type === "checkbox" ? String(Number(field.checked)) : field.value]);
      if (name === "metric") {
        this.suggestScale();
        remember(this.key("logy"), []);
      }
      this.draw();
    }

    suggestScale() {
      this.field("logy").checked = this.metric().log;
    }

    toggle(button) {
      const solver = Number(button.value);
      if (!this.hidden.delete(solver)) this.hidden.add(solver);
      button.setAttribute("aria-pressed", String(!this.hidden.has(solver)));
      remember(this.key("hide"), [...this.hidden].map((place) => data.solvers[place].name));
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
        responsive: true, displayModeBar: !layoutIsNarrow(), displaylogo: false, modeBarButtons: [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
      };
      Plotly.react(this.target, [...bands, ...lines], layout(metric, label, scales, colors(), shown), config);
    }

    rows() {
      const rows = [["solver", "metric", "axis", "x", "p20", "median", "p80", "setting"]];
      for (const curve of this.section.curves) {
        const setting = this.section.settings[curve.solver].join(" ");
        curve.x.forEach((x, place) => rows.push([
          data.solvers[curve.solver].name, curve.metric, curve.axis, x, curve.low[place], curve.median[place], curve.high[place], setting,
        ]));
      }
      return rows;
    }
  }

  const PANEL = { width: 330, height: 250, top: 34, bottom: 56, left: 64, right: 12 };

  class Heat {
    constructor(root, section) {
      this.heat = section.heat;
      this.target = root.querySelector(".heat");
      const values = this.heat.maps.flatMap((map) => map.spots.flat()).filter((spot) => spot && spot[0] !== null).map((spot) => spot[0]);
      const least = Math.min(...values);
      this.scale = least > 0 ? Math.log10 : (value) => value;
      this.ends = [this.scale(least), this.scale(Math.max(...values))];
      this.draw();
    }

    /** 1 for the best value of all maps, 0 for the worst. */
    goodness(value) {
      const [low, high] = this.ends;
      const share = high > low ? (this.scale(value) - low) / (high - low) : 0;
      return this.heat.better === "higher" ? share : 1 - share;
    }

    says(map, spot, x, y) {
      const [value, diverged, seeds] = spot;
      const lines = [`<b>${plain(data.solvers[map.solver].name)}</b>`, `${plain(map.x)} ${map.xs[x]}`];
      if (map.y) lines.push(`${plain(map.y)} ${map.ys[y]}`);
      lines.push(`${plain(this.heat.label)} ${short(value)}`, `${diverged} of ${seeds} seeds diverged`);
      return lines.join("<br>");
    }

    panel(map, number, columns, size, shades) {
      const id = number ? String(number + 1) : "";
      const [column, row] = [number % columns, Math.floor(number / columns)];
      const xs = [(column * size.cell + PANEL.left) / size.width, ((column + 1) * size.cell - PANEL.right) / size.width];
      const ys = [1 - ((row + 1) * PANEL.height - PANEL.bottom) / size.height, 1 - (row * PANEL.height + PANEL.top) / size.height];
      const grid = (pick) => map.spots.map((line, y) => line.map((spot, x) => (spot ? pick(spot, x, y) : null)));
      const common = { type: "heatmap", x: map.xs, y: map.ys, xaxis: "x" + id, yaxis: "y" + id, xgap: 2, ygap: 2, hoverinfo: "text", showscale: false };
      const text = grid((spot, x, y) => this.says(map, spot, x, y));
      const finite = {
        ...common, z: grid((spot) => (spot[0] === null ? null : this.goodness(spot[0]))), zmin: 0, zmax: 1, text,
        colorscale: [[0, shades.worst], [1, shades.best]],
      };
      const lost = { ...common, z: grid((spot) => (spot[0] === null ? 1 : null)), text, colorscale: [[0, shades["bad-page"]], [1, shades["bad-page"]]] };
      const axis = { type: "category", showgrid: false, zeroline: false, ticks: "", fixedrange: true, linecolor: transparent };
      const titled = (name) => ({ text: plain(name), standoff: 6, font: { size: 12 } });
      const axes = {
        ["xaxis" + id]: { ...axis, domain: xs, anchor: "y" + id, title: titled(map.x) },
        ["yaxis" + id]: { ...axis, domain: ys, anchor: "x" + id, title: titled(map.y) },
      };
      return { traces: [finite, lost], axes, notes: this.notes(map, id, xs, ys, shades), frame: this.frame(map, id, shades) };
    }

    notes(map, id, xs, ys, shades) {
      const written = map.spots.flatMap((line, y) => line.map((spot, x) => spot && this.note(map, spot, x, y, id, shades))).filter(Boolean);
      const title = {
        text: `<b>${plain(data.solvers[map.solver].name)}</b>`, showarrow: false, xref: "paper", yref: "paper", x: xs[0], y: ys[1],
        xanchor: "left", yanchor: "bottom", yshift: 6, font: { size: 13, color: shades.ink },
      };
      return [title, ...written];
    }

    note(map, spot, x, y, id, shades) {
      const [value, diverged] = spot;
      const color = value === null ? shades.bad : this.goodness(value) > 0.5 ? shades["on-best"] : shades.ink;
      const lines = value === null ? ["✕"] : [Number(value.toPrecision(3)).toString()];
      if (diverged && value !== null) lines.push(`${diverged} ✕`);
      return { text: lines.join("<br>"), showarrow: false, xref: "x" + id, yref: "y" + id, x, y, font: { size: 11, color } };
    }

    frame(map, id, shades) {
      if (!map.selected) return [];
      const [x, y] = map.selected;
      return [{
        type: "rect", xref: "x" + id, yref: "y" + id, x0: x - 0.48, x1: x + 0.48, y0: y - 0.48, y1: y + 0.48, line: { color: shades.ink, width: 2.5 },
      }];
    }

    draw() {
      const shades = colors();
      const width = this.target.clientWidth;
      if (!width) return;
      const columns = Math.max(1, Math.min(this.heat.maps.length, Math.floor(width / PANEL.width)));
      const size = { width, cell: Math.min(width / columns, 430), height: PANEL.height * Math.ceil(this.heat.maps.length / columns) };
      this.target.style.height = size.height + "px";
      const panels = this.heat.maps.map((map, number) => this.panel(map, number, columns, size, shades));
      const whole = {
        width, height: size.height, margin: { l: 0, r: 0, t: 0, b: 0 }, paper_bgcolor: transparent, plot_bgcolor: transparent,
        font: { color: shades.ink, size: 12, family: family() }, hoverlabel: { align: "left", bgcolor: shades.page, font: { color: shades.ink } },
        annotations: panels.flatMap((panel) => panel.notes), shapes: panels.flatMap((panel) => panel.frame), showlegend: false,
        ...Object.assign({}, ...panels.map((panel) => panel.axes)),
      };
      Plotly.react(this.target, panels.flatMap((panel) => panel.traces), whole, { displayModeBar: false });
    }

    rows() {
      const rows = [["solver", "x_parameter", "x", "y_parameter", "y", "median", "diverged", "seeds"]];
      for (const map of this.heat.maps) {
        map.spots.forEach((line, y) => line.forEach((spot, x) => {
          if (spot) rows.push([data.solvers[map.solver].name, map.x, map.xs[x], map.y, map.ys[y], ...spot]);
        }));
      }
      return rows;
    }
  }

  /** A table whose columns sort by a click; what has no number stays at the end. */
  class Table {
    constructor(root) {
      this.key = root.closest("section").id + "." + root.dataset.table + ".sort";
      this.root = root;
      this.body = root.querySelector("tbody");
      this.heads = [...root.querySelectorAll("thead th")];
      this.order = [...this.body.rows];
      this.heads.forEach((head, column) => this.makeSortable(head, column));
      const [column, way] = (view.get(this.key) || "").split(".");
      if (this.heads[column]) this.sort(Number(column), way === "down");
      this.scroll = root.querySelector(".scroll");
      new ResizeObserver(() => this.hint()).observe(this.scroll);
    }

    makeSortable(head, column) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        this.sort(column, down);
        remember(this.key, [`${column}.${down ? "down" : "up"}`]);
      });
    }

    value(row, column) {
      const cell = row.cells[column];
      if (!("value" in cell.dataset)) return cell.innerText;
      const number = Number(cell.dataset.value.replace("inf", "Infinity"));
      return Number.isNaN(number) ? Infinity : number;
    }

    sort(column, down) {
      this.heads.forEach((head, place) => head.setAttribute("aria-sort", place === column ? (down ? "descending" : "ascending") : "none"));
      const compare = (a, b) => {
        const [one, other] = [this.value(a, column), this.value(b, column)];
        if (one === Infinity || other === Infinity) return (one === Infinity) - (other === Infinity);
        return (typeof one === "number" ? one - other : one.localeCompare(other)) * (down ? -1 : 1);
      };
      this.body.append(...this.order.slice().sort(compare));
    }

    hint() {
      this.root.querySelector(".hint").hidden = this.scroll.scrollWidth <= this.scroll.clientWidth + 1;
    }

    rows() {
      const text = (cell) => cell.innerText.replace(/\s+/g, " ").trim();
      const head = this.heads.map(text);
      return [head, ...[...this.body.rows].map((row) => [...row.cells].map((cell) => cell.dataset.value ?? text(cell)))];
    }
  }

  /** A field of CSV; a text that a spreadsheet would take for a formula is marked as a text. */
  function field(value) {
    if (value === null || value === undefined) return "";
    const text = String(value);
    const safe = Number.isNaN(Number(text)) && /^[=+\-@\t\r]/.test(text) ? "'" + text : text;
    return /[",\n]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
  }
  const csv = (rows) => rows.map((row) => row.map(field).join(",")).join("\n") + "\n";

  function save(name, type, content) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  /** A figure as a file, on the color of the page, not on none. */
  async function saveFigure(target, name, format) {
    const { width, height } = target.getBoundingClientRect();
    const layout = { ...target.layout, paper_bgcolor: colors().page };
    const image = await Plotly.toImage({ data: target.data, layout }, { format, width, height, scale: format === "png" ? 2 : 1 });
    const text = image.slice(image.indexOf(",") + 1);
    const content = format === "svg" ? decodeURIComponent(text) : Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    save(name, format === "svg" ? "image/svg+xml" : "image/png", content);
  }

  const found = data.sections.map((section) => {
    const root = document.getElementById(section.id);
    return {
      root,
      curves: section.curves.length ? new Plot(root, section) : null,
      heat: section.heat.maps.length ? new Heat(root, section) : null,
    };
  });
  const tables = new Map([...document.querySelectorAll("[data-table]")].map((root) => [root, new Table(root)]));

  function download(button) {
    const { save: what, kind } = button.dataset;
    const section = button.closest("section").id;
    if (what === "all") return save("report.json", "application/json", document.getElementById("data").textContent);
    const owner = what === "table" ? tables.get(button.closest("[data-table]")) : found.find(({ root }) => root.id === section)[what];
    const name = `${section}-${what === "table" ? owner.root.dataset.table : what}.${kind}`;
    return kind === "csv" ? save(name, "text/csv", csv(owner.rows())) : saveFigure(owner.target, name, kind);
  }
  document.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", () => download(button)));

  // Links within the page scroll and are remembered beside the rest of the view.
  document.querySelectorAll('a[href^="#"]').forEach((link) => link.addEventListener("click", (event) => {
    const target = document.getElementById(link.hash.slice(1));
    event.preventDefault();
    target.tabIndex = -1;
    target.focus({ preventScroll: true });
    target.scrollIntoView();
    remember("at", [target.id]);
  }));
  if (view.has("at")) document.getElementById(view.get("at"))?.scrollIntoView();
  window.addEventListener("hashchange", () => location.reload());

  const redraw = () => found.forEach(({ curves, heat }) => [curves, heat].forEach((one) => one && one.draw()));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) redraw();
    width = window.innerWidth;
  });
})();
