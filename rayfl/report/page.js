"use strict";
// Draws the charts by Vega-Lite, sorts and saves tables, and shows the numbers of all charts as one table.
(() => {
  const page = JSON.parse(document.getElementById("charts").textContent);
  const charts = Object.entries(page.charts);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const contents = document.querySelector("nav ul");
  for (const heading of document.querySelectorAll("h2[id]")) {
    const link = Object.assign(document.createElement("a"), { href: `#${heading.id}`, textContent: heading.textContent });
    contents.appendChild(document.createElement("li")).append(link);
  }

  const draw = async (id, spec) => {
    const place = document.getElementById(id);
    const scheme = dark.matches ? "dark" : "light";
    // A legend has as many columns as there is room for.
    const longest = Math.max(0, ...(spec.encoding?.color?.legend?.values ?? []).map((label) => label.length));
    // The button of the menu takes some of it.
    const columns = Math.max(1, Math.floor((place.clientWidth - 40) / (8 * longest + 45)));
    const config = structuredClone(page.config[scheme]);
    Object.assign(config.legend, { columns, labelLimit: Math.max(place.clientWidth / columns - 40, 340) });
    config.axis.labelLimit = 0.42 * place.clientWidth;
    const series = spec.encoding?.color?.scale?.domain;
    const colors = config.range.category;
    if (series) config.range.category = series.map((label, index) => page.colors[label] ?? colors[index % colors.length]);
    const options = {
      actions: { export: true, source: false, compiled: false, editor: false },
      downloadFileName: `${document.title} ${place.parentElement.dataset.title}`.replace(/[^\w.-]+/g, "-").slice(0, 90),
      tooltip: { theme: scheme },
      // Errors only: Vega warns of an axis without values, which a legend can cause.
      logLevel: 1,
    };
    try {
      await vegaEmbed(place, { ...spec, config }, options);
    } catch (error) {
      place.textContent = `This chart cannot be drawn: ${error.message}`;
      console.error(error);
    }
  };
  // Each chart is drawn in a task of its own, so that the page answers meanwhile; a newer turn ends an older one.
  let turn = 0;
  const drawAll = async () => {
    const mine = ++turn;
    delete document.documentElement.dataset.drawn;
    for (const [id, spec] of charts) {
      await draw(id, spec);
      await new Promise((resume) => setTimeout(resume));
      if (mine !== turn) return;
    }
    document.documentElement.dataset.drawn = mine;
  };
  dark.addEventListener("change", drawAll);
  drawAll();

  for (const button of document.querySelectorAll(".sortable thead button"))
    button.addEventListener("click", () => {
      const head = button.closest("th"), body = button.closest("table").tBodies[0];
      const place = (row) => Number(row.dataset.places.split(" ")[head.cellIndex - 1]);
      const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      body.append(...[...body.rows].sort((a, b) => sign * (place(a) - place(b))));
    });

  const save = (text, name, ending, type) => {
    const href = URL.createObjectURL(new Blob([text], { type }));
    const download = `${name.replace(/[^\w.-]+/g, "-").slice(0, 90)}.${ending}`;
    Object.assign(document.createElement("a"), { href, download }).click();
    setTimeout(() => URL.revokeObjectURL(href));
  };
  const quoted = (value) => (typeof value === "string" ? `"${value.replaceAll('"', '""')}"` : value ?? "");
  const csv = (rows) => rows.map((row) => row.map(quoted).join(",") + "\r\n").join("");
  // "50.0 +- 2.8 % (2)" becomes columns of the value, its deviation and its count; the unit is in the heading.
  const CELL = /^([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?: \u00b1 ([\d.,]+(?:e[+-]?\d+)?))?(?: ([^\d\s(]+))?(?: \((\d+)\))?$/;
  const inNumbers = ([heads, ...body]) => {
    const columns = heads.flatMap((head, at) => {
      const cells = body.map((row) => row[at]);
      const fields = cells.map((cell) => CELL.exec(cell) ?? []);
      const units = [...new Set(fields.map((field) => field[3]).filter(Boolean))];
      const isText = cells.some((cell, row) => !fields[row].length && cell !== "\u2013");
      if (isText || units.length > 1) return [[head, ...cells]];
      const names = [[1, [head, ...units].join(", ")], [2, `${head}, sd`], [4, `${head}, n`]];
      return names
        .filter(([group]) => group === 1 || fields.some((field) => field[group]))
        .map(([group, name]) => [name, ...fields.map((field) => field[group] && Number(field[group].replaceAll(",", "")))]);
    });
    return columns[0].map((_, row) => columns.map((column) => column[row]));
  };
  const LATEX = {
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "$<$", ">": "$>$",
    "\u00b1": "$\\pm$", "\u2212": "$-$", "\u2013": "--",
  };
  const latex = (rows) => {
    const written = (cell) => cell.replace(/[\\~^<>\u00b1\u2212\u2013&%$#_{}]/g, (one) => LATEX[one] ?? `\\${one}`);
    const [head, ...body] = rows.map((row) => `${row.map(written).join(" & ")} \\\\`);
    const begin = `\\begin{tabular}{l${"r".repeat(rows[0].length - 1)}}`;
    return [begin, "\\toprule", head, "\\midrule", ...body, "\\bottomrule", "\\end{tabular}", ""].join("\n");
  };
  const markdown = (rows) => {
    const written = (cell) => cell.replace(/[\\|*_<`]/g, "\\$&");
    const [head, ...body] = rows.map((row) => `| ${row.map(written).join(" | ")} |\n`);
    return [head, `|${" --- |".repeat(rows[0].length)}\n`, ...body].join("");
  };
  const FORMATS = {
    CSV: [(rows) => csv(inNumbers(rows)), "csv", "text/csv"],
    LaTeX: [latex, "tex", "application/x-tex"],
    Markdown: [markdown, "md", "text/markdown"],
  };
  for (const region of document.querySelectorAll(".scroll[data-title]")) {
    const line = Object.assign(document.createElement("p"), { className: "note export", textContent: "Save as" });
    const cells = (row) => [...row.cells].map((cell) => cell.textContent.trim().replace(/\s*\n\s*/g, "; "));
    for (const [format, [write, ending, type]] of Object.entries(FORMATS)) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: format });
      button.addEventListener("click", () => {
        const rows = [...region.querySelector("table").rows].map(cells);
        save(write(rows), `${document.title} ${region.dataset.title}`, ending, type);
      });
      line.append(" ", button);
    }
    region.after(line);
  }

  const numbers = document.getElementById("numbers");
  if (!numbers) return;
  // A row per point of a chart; a row of data holds lists.
  const allPoints = () => charts.flatMap(([id, spec]) => {
    const chart = document.getElementById(id).parentElement.dataset.title;
    return (spec.data?.values ?? []).flatMap((row) => {
      const lists = Object.entries(row).filter(([, value]) => Array.isArray(value));
      const count = Math.max(1, ...lists.map(([, list]) => list.length));
      const point = (at) => Object.fromEntries(lists.map(([name, list]) => [name, list[at]]));
      return Array.from({ length: count }, (_, at) => ({ chart, ...row, ...point(at) }));
    });
  });
  const MOST_ROWS = 1000;
  let table = [];
  const rowOf = (cells, tag) => {
    const row = document.createElement("tr");
    for (const cell of cells) row.appendChild(document.createElement(tag)).textContent = cell ?? "";
    return row;
  };
  numbers.addEventListener("toggle", () => {
    if (table.length) return;
    const points = allPoints();
    const columns = [...new Set(points.flatMap(Object.keys))];
    table = [columns, ...points.map((point) => columns.map((name) => point[name]))];
    const [head, ...rows] = table;
    const element = numbers.querySelector("table");
    element.createTHead().append(rowOf(head, "th"));
    element.createTBody().append(...rows.slice(0, MOST_ROWS).map((row) => rowOf(row, "td")));
    const shown = rows.length > MOST_ROWS ? `, of which the first ${MOST_ROWS} are shown here` : "";
    numbers.querySelector("output").textContent = `${rows.length} rows${shown}.`;
  });
  numbers.querySelector("button").addEventListener("click", () => save(csv(table), document.title, "csv", "text/csv"));
})();
