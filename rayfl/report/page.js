"use strict";
// Draws the page's charts by Vega-Lite, and draws them again when a switch, a legend or the colour scheme changes.
(() => {
  const page = JSON.parse(document.getElementById("charts").textContent);
  const DASHES = [[], [6, 6], [2, 4], [10, 4, 2, 4]];
  const state = { x: "round", logX: false, smooth: 0, hidden: new Set() };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const make = (tag, options = {}, ...inside) => {
    const element = Object.assign(document.createElement(tag), options);
    element.append(...inside);
    return element;
  };

  // A smoothed line is an exponential moving average, corrected for its beginning.
  const smoothed = (values, weight) => {
    let sum = 0, share = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return sum / share;
    });
  };
  const axisOf = (line) => (state.x in page.xs[line.x] ? state.x : Object.keys(page.xs[line.x])[0]);
  const said = (chart, value) =>
    chart.percent ? `${(100 * value).toFixed(2)} %` : value.toLocaleString("en", { maximumSignificantDigits: 4 });
  // Vega-Lite writes titles into expressions, and leaves backslashes as they are.
  const plain = (title) => title.replaceAll(/["\\]/g, "'");
  const shownLines = (chart) => chart.lines.filter((line) => !state.hidden.has(line.name));

  // Rows of the lines that are to be seen; `still`: those that have no place on the axes.
  const rowsOf = (chart) => {
    const rows = [], still = [];
    for (const line of shownLines(chart)) {
      const x = page.xs[line.x][axisOf(line)], y = smoothed(line.y, state.smooth);
      const costs = axisOf(line) !== "round" && axisOf(line) in page.axes;
      const side = (name) => (line[name] ? smoothed(line[name], state.smooth) : null);
      const sides = Object.fromEntries(["low", "high", "low2", "high2"].map((name) => [name, side(name)]));
      const fits = (at) => (!(state.logX || costs) || x[at] > 0) && (!chart.log || y[at] > 0);
      const places = [...x.keys()].filter((at) => x[at] !== null && y[at] !== null && fits(at));
      if (!places.length) still.push(line.name);
      for (const at of places) {
        const row = { series: line.name, x: x[at], y: y[at], said: said(chart, y[at]), alone: places.length < 12 };
        if (state.smooth) row.raw = line.y[at];
        for (const [name, values] of Object.entries(sides))
          if (values && values[at] !== null) row[name] = chart.log ? Math.max(values[at], y[at] / 100) : values[at];
        if (sides.low) row.said += ` (${said(chart, sides.low[at])} to ${said(chart, sides.high[at])})`;
        rows.push(row);
      }
    }
    return { rows, still };
  };

  // The y axis of lines: shares stay within 0 and 1, and span a hundredth at least.
  const domainOf = (chart, rows) => {
    const values = rows.flatMap((row) => [row.y, row.raw ?? row.y, row.low ?? row.y, row.high ?? row.y]);
    if (!values.length) return [0, 1];
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    if (chart.log) return [low / 1.15, high * 1.15];
    const least = chart.percent ? 0.01 : Math.max(0.02 * Math.abs(high), 1e-9);
    const margin = Math.max(0.05 * (high - low), (least - (high - low)) / 2);
    low = chart.zero ? Math.min(0, low) : low - margin;
    high += margin;
    if (!chart.percent) return [low, high];
    low = Math.max(0, Math.min(low, 1 - least));
    return [low, Math.min(1, Math.max(high, low + least))];
  };

  const look = () => {
    const css = getComputedStyle(document.documentElement);
    return (name) => css.getPropertyValue(`--${name}`).trim();
  };
  const configOf = (value, legend) => {
    const font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', 'DejaVu Sans', sans-serif";
    const words = { labelColor: value("soft"), titleColor: value("ink"), titleFontWeight: "normal", labelFontSize: 12 };
    const axis = { ...words, titleFontSize: 12, gridColor: value("line"), domainColor: value("soft"), tickColor: value("soft") };
    return {
      font,
      background: legend ? value("paper") : "transparent",
      axis: { ...axis, titlePadding: 8 },
      axisX: { labelOverlap: true, labelFlush: false, tickCount: 7 },
      title: { color: value("ink"), anchor: "start" },
      legend: { ...words, disable: !legend, symbolType: "stroke", symbolOpacity: 1, symbolStrokeWidth: 3, orient: "bottom", columns: 3, labelLimit: 300, title: null },
      view: { stroke: null },
      text: { color: value("ink"), fontSize: 12 },
      boxplot: { median: { color: value("ink") }, rule: { color: value("soft") } },
    };
  };

  // The specification of a chart as the switches stand; `legend`: for a file, where nothing is beside it.
  const specOf = (chart, value, room, legend) => {
    const spec = structuredClone(chart.spec ?? page.lines);
    let rows, still = [];
    if (chart.lines) {
      ({ rows, still } = rowsOf(chart));
    } else if (chart.rows) {
      const columns = Object.entries(chart.rows);
      rows = columns[0][1].map((_, at) => Object.fromEntries(columns.map(([name, cells]) => [name, cells[at]])));
      rows = rows.filter((row) => !state.hidden.has(row.series));
    }
    if (rows) spec.datasets = { rows };
    if (chart.lines) spec.layer = spec.layer.filter(({ encoding }) => rows.some((row) => encoding.y.field in row));
    const seen = new Set(rows?.map((row) => row.series));
    const series = Object.keys(chart.styles).filter((name) => seen.has(name));
    const axis = chart.lines?.length ? axisOf(chart.lines[0]) : null;
    const title = page.axes[axis] ?? axis;
    const domain = chart.lines ? domainOf(chart, rows) : null;
    const dashes = series.map((name) => DASHES[chart.lines?.find((line) => line.name === name)?.dash ?? 0]);
    for (const layer of [spec, ...(spec.layer ?? [])]) {
      const { x, y, color, strokeDash, tooltip } = layer.encoding ?? {};
      if (typeof color?.value === "string") color.value = value(color.value.replace(/^var\(--|\)$/g, ""));
      if (color?.field === "series") color.scale = { domain: series, range: series.map((name) => value(`c${chart.styles[name]}`)) };
      if (color && legend && color.field === "series") color.legend = { title: null };
      if (strokeDash) strokeDash.scale = { domain: series, range: dashes };
      if (!chart.lines || !x) continue;
      Object.assign(x, { title: state.logX && axis !== "round" ? `${title} (logarithmic)` : title });
      // Lines at the edge are drawn whole.
      const inside = { range: [6, { expr: "width - 6" }], nice: false };
      x.scale = state.logX ? { type: "log", ...inside } : { zero: axis in page.axes, ...inside };
      if (axis === "round") x.axis = { format: "d", tickMinStep: 1, labelExpr: "datum.value % 1 ? '' : datum.label" };
      y.title = chart.log ? `${chart.y} (logarithmic)` : chart.y;
      y.scale = { domain, nice: false, range: [{ expr: "height - 5" }, 5] };
      Object.assign(y.scale, chart.log ? { type: "log" } : { zero: false });
      if (chart.percent) y.axis = { format: ".3~%" };
      for (const one of tooltip ?? []) if (one.field !== "series") one.title = one.field === "x" ? title : chart.y;
    }
    if (chart.lines && room > 640) spec.height = 340;
    spec.config = configOf(value, legend);
    spec.config.axisY = { labelLimit: room < 500 ? 105 : 200 };
    return { spec, still, many: (rows?.length ?? 0) > 1500 };
  };

  // Vega places the labels of dots where they hide nothing. The cells around points that answer the pointer know their
  // point as datum.datum, which Vega-Lite forgets for words in a tooltip.
  const patch = (vega) => {
    const visit = (marks) => {
      for (const mark of marks ?? []) {
        if (mark.type === "text" && mark.name?.includes("labels")) mark.transform = [page.labels];
        const tooltip = mark.name?.endsWith("_voronoi") ? mark.encode.update.tooltip : null;
        if (tooltip?.signal) tooltip.signal = tooltip.signal.replace(/(?<!datum\.)datum\[/g, "datum.datum[");
        visit(mark.marks);
      }
    };
    visit(vega.marks);
    return vega;
  };

  const draw = async (chart) => {
    const place = document.getElementById(chart.id);
    const { spec, still, many } = specOf(chart, look(), place.clientWidth);
    const note = place.parentElement.querySelector(".still");
    note.textContent = still.length ? `Not drawn, as nothing of it is above zero: ${still.join(", ")}.` : "";
    chart.view?.finalize();
    if (spec.datasets?.rows?.length === 0) {
      chart.view = null;
      place.firstElementChild.replaceChildren();
      note.textContent ||= "Nothing of it is chosen in the legend, or it was not measured.";
      return;
    }
    const options = { actions: false, renderer: many ? "canvas" : "svg", patch, tooltip: { theme: dark.matches ? "dark" : "light" } };
    try {
      chart.view = (await vegaEmbed(place.firstElementChild, spec, options)).view;
    } catch (error) {
      chart.view = null;
      note.textContent = `This chart cannot be drawn: ${error.message}`;
      console.error(error);
    }
  };

  // Charts near the reader come first; a newer turn ends an older one.
  let turn = 0;
  const drawAll = async (wanted = () => true) => {
    const mine = ++turn;
    delete document.documentElement.dataset.drawn;
    for (const chart of page.charts) chart.stale ||= wanted(chart);
    const away = (chart) => Math.abs(document.getElementById(chart.id).getBoundingClientRect().top);
    for (const chart of page.charts.filter((one) => one.stale).sort((a, b) => away(a) - away(b))) {
      await draw(chart);
      if (mine !== turn) return;
      chart.stale = false;
      await new Promise((resume) => setTimeout(resume));
    }
    document.documentElement.dataset.drawn = mine;
  };

  const save = (name, content) => {
    const url = typeof content === "string" ? content : URL.createObjectURL(content);
    make("a", { href: url, download: name }).click();
  };
  const fileName = (chart, ending) =>
    `${document.title} ${chart.title}`.replace(/[^\w.-]+/g, "-").slice(0, 90) + `.${ending}`;
  const picture = async (chart, ending) => {
    // On white with a legend, whatever the page looks like.
    const light = (name) => page.light[name];
    const { spec } = specOf(chart, light, 720, true);
    const place = make("div", { className: "offscreen" });
    document.body.append(place);
    spec.title = chart.title;
    const { view } = await vegaEmbed(place, { ...spec, width: spec.width === "container" ? 720 : spec.width }, { actions: false, patch });
    if (ending === "png") save(fileName(chart, ending), await view.toImageURL("png", 2));
    else save(fileName(chart, ending), new Blob([await view.toSVG()], { type: "image/svg+xml" }));
    view.finalize();
    place.remove();
  };
  const csvOf = (chart) => {
    const cell = (value) => (typeof value === "string" ? `"${value.replaceAll('"', '""')}"` : value ?? "");
    let table;
    if (chart.lines) {
      const sides = ["low", "high", "low2", "high2"].filter((name) => chart.lines.some((line) => line[name]));
      const axes = Object.keys(page.xs[chart.lines[0].x]);
      table = [["series", ...axes, "value", ...sides]];
      for (const line of chart.lines)
        line.y.forEach((y, at) =>
          table.push([line.name, ...axes.map((axis) => page.xs[line.x][axis]?.[at]), y, ...sides.map((side) => line[side]?.[at])]));
    } else {
      const columns = chart.rows ?? Object.fromEntries(["x", "y", "x2", "y2"].map((name) => [name, chart.spec.layer[0].data.values.map((row) => row[name])]));
      table = [Object.keys(columns), ...Object.values(columns)[0].map((_, at) => Object.values(columns).map((cells) => cells[at]))];
    }
    return table.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
  };

  // Zoom and pan lines by their centre: `factor` 0 shows all again, `shift` is in widths and heights.
  const move = (chart, factor, shift = [0, 0]) => {
    if (!chart.lines || !chart.view) return;
    if (!factor) return void draw(chart);
    ["x", "y"].forEach((axis, number) => {
      const scale = chart.view.scale(axis), log = scale.type === "log";
      const [low, high] = scale.domain().map((value) => (log ? Math.log(value) : value));
      const middle = (low + high) / 2 + shift[number] * (high - low), half = ((high - low) / 2) * factor;
      chart.view.signal(`zoom_${axis}`, [middle - half, middle + half].map((value) => (log ? Math.exp(value) : value)));
    });
    chart.view.runAsync();
  };
  const KEYS = {
    "+": [0.8], "=": [0.8], "-": [1.25], 0: [0],
    ArrowLeft: [1, [-0.1, 0]], ArrowRight: [1, [0.1, 0]], ArrowUp: [1, [0, 0.1]], ArrowDown: [1, [0, -0.1]],
  };

  const prepare = (chart) => {
    const place = document.getElementById(chart.id), figure = place.parentElement;
    chart.title = figure.dataset.title;
    if (chart.lines) chart.y = plain(chart.y);
    place.append(make("div", { className: "vega" }));
    const tools = make("div", { className: "tools" });
    const button = (text, label, act) => {
      const made = make("button", { type: "button", title: label }, text);
      made.setAttribute("aria-label", `${label}: ${chart.title}`);
      made.addEventListener("click", () => act(made));
      tools.append(made);
      return made;
    };
    if (chart.lines) {
      const log = button("log y", "Logarithmic y axis", () => {
        chart.log = !chart.log;
        log.setAttribute("aria-pressed", chart.log);
        draw(chart);
      });
      log.setAttribute("aria-pressed", chart.log);
      button("+", "Zoom in", () => move(chart, 0.8));
      button("\u2212", "Zoom out", () => move(chart, 1.25));
      button("all", "Show all again", () => move(chart, 0));
      place.addEventListener("keydown", (event) => {
        if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        move(chart, ...KEYS[event.key]);
      });
    }
    button("PNG", "Save as PNG", () => picture(chart, "png"));
    button("SVG", "Save as SVG", () => picture(chart, "svg"));
    button("CSV", "Save the numbers as CSV", () => save(fileName(chart, "csv"), new Blob([csvOf(chart)], { type: "text/csv" })));
    place.after(tools, make("p", { className: "still note", role: "status" }));
  };

  const prepareLegends = () => {
    const entries = [...document.querySelectorAll(".legend button")];
    const changed = (names) => {
      for (const entry of entries) entry.setAttribute("aria-pressed", !state.hidden.has(entry.textContent));
      drawAll((chart) => names.some((name) => name in chart.styles));
    };
    for (const entry of entries) {
      const name = entry.textContent;
      const beside = [...entry.closest(".legend").querySelectorAll("button")].map((one) => one.textContent);
      entry.addEventListener("click", () => {
        state.hidden.delete(name) || state.hidden.add(name);
        changed([name]);
      });
      entry.addEventListener("dblclick", () => {
        const alone = beside.every((other) => other === name || state.hidden.has(other));
        for (const other of beside) alone || other === name ? state.hidden.delete(other) : state.hidden.add(other);
        changed(beside);
      });
    }
  };

  // Ends of lines that lie a factor of ten apart cannot be read on a linear axis.
  const farApart = () => {
    const ends = page.xs.filter((x) => state.x in x).map((x) => Math.max(...x[state.x])).filter((end) => end > 0);
    return state.x !== "round" && ends.length > 1 && Math.max(...ends) >= 10 * Math.min(...ends);
  };
  const prepareSwitches = () => {
    const form = document.getElementById("switches");
    if (!form) return;
    form.hidden = false;
    form.reset();
    const { log_x: log, smooth } = form.elements;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => {
      if (event.target.name === "x") {
        state.x = event.target.value;
        log.checked = farApart();
      }
      state.logX = log.checked;
      state.smooth = Number(smooth.value);
      form.querySelector("output").textContent = smooth.value;
      drawAll((chart) => Boolean(chart.lines));
    });
  };

  const prepareTables = () => {
    for (const button of document.querySelectorAll(".sortable thead button"))
      button.addEventListener("click", () => {
        const head = button.closest("th"), body = button.closest("table").tBodies[0];
        const place = (row) => Number(row.dataset.places.split(" ")[head.cellIndex - 1]);
        for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", "ascending");
        body.append(...[...body.rows].sort((a, b) => place(a) - place(b)));
      });
  };

  page.charts.forEach(prepare);
  prepareLegends();
  prepareSwitches();
  prepareTables();
  dark.addEventListener("change", () => drawAll());
  drawAll();
})();
