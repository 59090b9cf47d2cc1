"use strict";
// Draws the charts, and makes the controls, the legends, the table and the theme work.
(() => {
  const { charts, texts } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const palettes = {
    // Okabe and Ito's colours, told apart by the colour-blind; on dark paper lighter ones of the same hues.
    light: {
      series: ["#0072b2", "#d55e00", "#009e73", "#b0568b", "#b67f00", "#3a9bd1", "#555555", "#7a5c1e"],
      ramp: ["#3b1c5a", "#2f5c8f", "#1d8f85", "#6aa84f", "#c7a008"],
      ink: "#1e2524", quiet: "#5a6563", rule: "#e8e5de", paper: "#fcfbf8", raised: "#ffffff",
    },
    dark: {
      series: ["#56b4e9", "#ff8a4a", "#2fc79b", "#e08fbd", "#f0b429", "#9ad3f5", "#bbbbbb", "#d0b26a"],
      ramp: ["#a99bf0", "#5aa7e6", "#38c9b4", "#9bd35a", "#ffe066"],
      ink: "#e9e7e2", quiet: "#a3adab", rule: "#2b3233", paper: "#131718", raised: "#1e2425",
    },
  };
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  let printing = false; // on white paper

  function parts(hex) {
    return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  }
  function colour(token, palette) {
    const [name, opacity] = token.split("/");
    const [kind, place] = name.split(":");
    let rgb;
    if (kind === "series") rgb = parts(palette.series[Number(place) % palette.series.length]);
    else if (kind === "ramp") {
      const at = Number(place) * (palette.ramp.length - 1);
      const left = Math.min(Math.floor(at), palette.ramp.length - 2);
      const [a, b] = [parts(palette.ramp[left]), parts(palette.ramp[left + 1])];
      rgb = a.map((v, i) => Math.round(v + (b[i] - v) * (at - left)));
    } else rgb = parts(palette[kind]);
    return `rgba(${rgb.join(",")},${opacity || 1})`;
  }
  const hidden = {}; // by chart: the labels that were switched off
  function chosen(id) {
    const form = document.querySelector(`form[data-for="${id}"]`);
    const picked = [...form.querySelectorAll("input[type=radio]:checked, select")].map((control) => control.value);
    return charts[id][picked.join("|")];
  }
  function draw(id) {
    const box = document.getElementById(id);
    const view = chosen(id);
    const words = document.getElementById(`${id}-words`);
    const palette = palettes[dark() && !printing ? "dark" : "light"];
    if (!view) {
      box.replaceChildren();
      words.textContent = "This method was not measured so.";
      legend(id, [], palette);
      return;
    }
    const off = hidden[id] || (hidden[id] = new Set());
    const groups = new Set(view.legend.filter((entry) => off.has(entry.label)).map((entry) => entry.group));
    const byPowers = Boolean(document.querySelector(`form[data-for="${id}"] .log`)?.checked);
    drawChart(box, view, { palette, paint: (token) => colour(token, palette), texts, hidden: groups, byPowers });
    box.dataset.drawn = "yes";
    if (words.textContent !== view.summary) words.textContent = view.summary;
    legend(id, view.legend, palette);
  }

  function legend(id, entries, palette) {
    const list = document.querySelector(`ul[data-for="${id}"]`);
    const shown = entries.length > 1 ? entries : [];
    const same = list.dataset.labels === JSON.stringify(shown);
    list.dataset.labels = JSON.stringify(shown);
    if (!same) list.replaceChildren(...shown.map((entry) => item(id, entry)));
    shown.forEach((entry, i) => {
      const swatch = list.children[i].querySelector("svg");
      swatch.style.stroke = swatch.style.fill = colour(entry.color, palette);
    });
  }
  function item(id, entry) {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = !hidden[id].has(entry.label);
    box.addEventListener("change", () => {
      hidden[id][box.checked ? "delete" : "add"](entry.label);
      draw(id);
    });
    const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    swatch.setAttribute("viewBox", "0 0 30 14");
    swatch.setAttribute("aria-hidden", "true");
    const line = entry.symbol === "bar" ? "" : `<path d="M1 7h28" fill="none" stroke-width="2" stroke-dasharray="${drawChart.DASHES[entry.dash] || ""}"/>`;
    const mark = entry.symbol === "bar" ? '<rect x="9" y="2" width="12" height="10" rx="2"/>'
      : entry.symbol === "line" ? "" : `<path d="${drawChart.shape(entry.symbol, 15, 7, 4.5)}"${entry.symbol === "ring" ? ' fill="none" stroke-width="1.4"' : ""}/>`;
    swatch.innerHTML = line + mark;
    const text = document.createElement("span");
    text.textContent = entry.label;
    const label = document.createElement("label");
    label.append(box, swatch, text);
    const row = document.createElement("li");
    row.append(label);
    return row;
  }

  // All at once, before the page is first shown: nothing moves later.
  const boxes = [...document.querySelectorAll(".plot")];
  const again = () => boxes.forEach((box) => draw(box.id));
  again();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) again();
    width = innerWidth;
  });
  for (const [event, state] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => { printing = state; again(); });
  }
  for (const form of document.querySelectorAll("form[data-for]")) {
    form.addEventListener("change", () => draw(form.dataset.for));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  const toggle = document.getElementById("theme");
  function label() {
    toggle.textContent = dark() ? "Light" : "Dark";
    toggle.setAttribute("aria-label", dark() ? "Use light colours" : "Use dark colours");
    toggle.setAttribute("aria-pressed", String(dark()));
  }
  function remember(theme) {
    try { localStorage.setItem("espalier-theme", theme); } catch { /* a page from a file may have no storage */ }
  }
  toggle.hidden = false;
  toggle.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    remember(root.dataset.theme);
    label();
    again();
  });
  system.addEventListener("change", () => { label(); again(); });
  label();

  const table = document.getElementById("runs-table");
  const rows = [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells];
  function sortBy(column) {
    const down = heads[column].getAttribute("aria-sort") === "ascending";
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== column ? "none" : down ? "descending" : "ascending"));
    const key = (row) => row.cells[column].dataset.key ?? row.cells[column].textContent;
    const numbers = rows.every((row) => key(row) === "" || !Number.isNaN(Number(key(row))));
    const compare = new Intl.Collator("en", { numeric: true }).compare;
    rows.sort((one, other) => {
      const [a, b] = [key(one), key(other)];
      if (a === "" || b === "") return (a === "") - (b === ""); // what is not known stands last, either way
      const order = numbers ? a - b : compare(a, b);
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }
  heads.forEach((head, i) => head.querySelector("button").addEventListener("click", () => sortBy(i)));
  const find = document.getElementById("find");
  const method = document.getElementById("method");
  const methodColumn = heads.findIndex((head) => head.textContent.trim() === "method");
  // Powers may be typed as 2^-6 or as they are printed.
  const raised = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹";
  const typed = (text) => text.toLowerCase().replace(/[⁻⁰¹²³⁴-⁹]+/g, (power) => "^" + [...power].map((sign) => "-0123456789"[raised.indexOf(sign)]).join(""));
  const searched = new Map(rows.map((row) => [row, typed(row.textContent)]));
  function filter() {
    const words = typed(find.value).split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const fits = words.every((word) => searched.get(row).includes(word))
        && (!method.value || row.cells[methodColumn].textContent === method.value);
      row.hidden = !fits;
      shown += fits;
    }
    const runs = rows.length === 1 ? "run" : "runs";
    document.getElementById("count").textContent = shown === rows.length ? `${shown} ${runs}` : `${shown} of ${rows.length} ${runs}`;
  }
  find.addEventListener("input", filter);
  method.addEventListener("change", filter);
  document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());

  for (const button of document.querySelectorAll(".copy")) {
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code); // not allowed here: it is ready to be copied by hand
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
})();
