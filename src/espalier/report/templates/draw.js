"use strict";
// Draws one view of a chart as SVG (lines, bands, marks with arms, bars, a heat map) and tells what is pointed at.
// drawChart(box, view, look): look has palette, paint (a token to a colour), texts, hidden (groups), and byPowers.
const drawChart = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = { dash: "7 5", dot: "2 4", dashdot: "7 4 2 4", longdash: "10 5", longdashdot: "10 4 2 4" };
  const CIVIDIS = ["#00224e", "#1a386f", "#434e6c", "#61656f", "#7d7c78", "#9b9476", "#bcae6c", "#dec958", "#fee838"];
  const POLYGONS = {
    square: [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]], diamond: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
    "triangle-up": [[0, -1.2], [1.15, 0.85], [-1.15, 0.85]], "triangle-down": [[0, 1.2], [1.15, -0.85], [-1.15, -0.85]],
    cross: [[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]],
    star: Array.from({ length: 10 }, (_, i) => [1.4, 0.6][i % 2]).map((r, i) => [r * Math.sin(i * Math.PI / 5), -r * Math.cos(i * Math.PI / 5)]),
  };
  POLYGONS.x = POLYGONS.cross.map(([x, y]) => [(x - y) * 0.75, (x + y) * 0.75]);
  const pen = document.createElement("canvas").getContext("2d");
  let charts = 0;

  function make(parent, tag, attributes, text) {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }
  function shape(symbol, x, y, r) {
    const points = POLYGONS[symbol];
    if (!points) return `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`;
    return `M${points.map(([a, b]) => `${(x + a * r).toFixed(2)} ${(y + b * r).toFixed(2)}`).join("L")}z`;
  }
  const short = (value, digits) => String(Number(value.toPrecision(digits)));
  const FORMATS = {
    percent: (v) => `${short(100 * v, 3)}%`,
    count: (v) => (Math.abs(v) >= 1e6 ? `${short(v / 1e6, 3)}M` : Math.abs(v) >= 1e3 ? `${short(v / 1e3, 3)}k` : short(v, 3)),
    number: (v) => short(v, 3),
  };
  const told = { percent: (v) => `${(100 * v).toFixed(2)}%`, number: (v) => short(v, 4) };

  // Where values of an axis go between two pixels, and its ticks.
  function scale(axis, values, from, to, most) {
    if (axis.categories) {
      const step = (to - from) / axis.categories.length;
      const at = (i) => from + (i + 0.5) * step;
      return { at, step, ticks: axis.categories.map((text, i) => [i, text]) };
    }
    const log = axis.type === "log";
    const f = log ? Math.log10 : (v) => v;
    const good = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
    let [low, high] = axis.range || [Math.min(...good), Math.max(...good)];
    if (!axis.range) {
      if (axis.zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
      const room = (f(high) - f(low) || Math.abs(f(high)) || 1) * 0.05;
      const back = log ? (v) => 10 ** v : (v) => v;
      [low, high] = [axis.zero && low === 0 ? 0 : back(f(low) - room), back(f(high) + room)];
    }
    const at = (v) => from + (to - from) * (f(v) - f(low)) / (f(high) - f(low));
    const text = FORMATS[axis.format || "number"];
    let ticks = axis.ticks;
    if (!ticks && log) {
      ticks = [];
      for (let k = Math.floor(f(low)); k <= Math.ceil(f(high)); k += 1) {
        for (const s of f(high) - f(low) > 3 ? [1] : [1, 2, 5]) if (s * 10 ** k >= low && s * 10 ** k <= high) ticks.push(s * 10 ** k);
      }
    } else if (!ticks) {
      const rough = (high - low) / most;
      const unit = 10 ** Math.floor(Math.log10(rough));
      const step = unit * [1, 2, 5, 10].find((s) => s * unit >= rough * 0.999);
      const first = Math.ceil(low / step - 1e-9);
      ticks = Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
    }
    return { at, low, high, ticks: ticks.map((tick) => (Array.isArray(tick) ? tick : [tick, text(tick)])) };
  }
  function fitting(text, room) {
    if (pen.measureText(text).width <= room) return text;
    let cut = text;
    while (cut.length > 1 && pen.measureText(`${cut}…`).width > room) cut = cut.slice(0, -1);
    return `${cut}…`;
  }

  function draw(box, view, look) {
    const { palette, paint } = look;
    const font = getComputedStyle(document.body).fontFamily;
    pen.font = `12px ${font}`;
    const width = Math.max(box.clientWidth, 240);
    const height = Math.max(box.clientHeight, 160);
    const narrow = width < 560;
    const { xaxis, yaxis, labels = [], marks = [], groups } = view.layout;
    const traces = view.traces.filter((trace) => !look.hidden.has(trace.group));
    const heat = traces.find((trace) => trace.type === "heat");
    const ys = traces.flatMap((t) => (t.type === "band" ? [...t.low, ...t.high] : [...(t.y || []), ...(t.arms?.y || []).flat()]));
    const xs = traces.flatMap((t) => t.x || []);
    const across = { ...xaxis };
    if (look.byPowers) {
      const sizes = xs.filter((x) => x > 0);
      Object.assign(across, { type: "log", range: [Math.min(...sizes) / 1.25, Math.max(...sizes) * 1.25] });
      const ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1].filter((share) => share >= across.range[0] && share <= across.range[1]);
      if (ticks.length) across.ticks = ticks;
    }
    const side = heat ? 44 : narrow ? 10 : 18;
    const top = 14;
    const rough = scale(yaxis, ys, 1, 0, narrow ? 5 : 7);
    const words = rough.ticks.map(([value, text, brief]) => [value, fitting((narrow && brief) || text, 0.34 * width)]);
    const left = Math.max(...words.map(([, text]) => pen.measureText(text).width), 12) + 10 + (yaxis.title ? 20 : 0);
    // Names of categories that do not fit side by side stand upright.
    const named = across.categories || [];
    const upright = named.length > 0 && Math.max(...named.map((text) => pen.measureText(text).width)) > (width - left - side) / named.length - 6;
    const hang = upright ? Math.min(Math.max(...named.map((text) => pen.measureText(text).width)), 0.4 * height) : 14;
    const bottom = height - hang - 8 - (across.title ? 22 : 4);
    const x = scale(across, xs, left, width - side, narrow ? 5 : 9);
    const y = scale(yaxis, ys, bottom, top, narrow ? 5 : 7);
    const svg = document.createElementNS(NS, "svg");
    const clip = `clip-${(charts += 1)}`;
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, "font-family": font, "font-size": 12, "aria-hidden": "true", class: "drawing" })) svg.setAttribute(name, value);
    make(make(make(svg, "defs", {}), "clipPath", { id: clip }), "rect", { x: left - 12, y: top - 12, width: width - side - left + 24, height: bottom - top + 24 });
    const frame = make(svg, "g", { fill: palette.quiet });
    for (const [value, text] of words) {
      const at = y.at(value);
      if (at < top - 1 || at > bottom + 1) continue;
      if (!heat) make(frame, "path", { d: `M${left} ${at}H${width - side}`, stroke: palette.rule });
      make(frame, "text", { class: "ytick", x: left - 8, y: at + 4, "text-anchor": "end" }, text);
    }
    let free = -Infinity;
    const order = upright ? Math.max(1, Math.ceil(14 / x.step)) : 1;
    x.ticks.forEach(([value, text], i) => {
      const at = x.at(value);
      const half = pen.measureText(text).width / 2;
      if (at < left - 1 || at > width - side + 1 || (!upright && at - half < free) || i % order) return;
      free = at + half + 8;
      if (!heat && !named.length) make(frame, "path", { d: `M${at} ${top}V${bottom}`, stroke: palette.rule });
      if (upright) make(frame, "text", { class: "xtick", "text-anchor": "end", transform: `translate(${at + 4} ${bottom + 8}) rotate(-90)` }, fitting(text, hang));
      else make(frame, "text", { class: "xtick", x: Math.min(at, width - half - 2), y: bottom + 18, "text-anchor": "middle" }, text);
    });
    if (across.title) make(frame, "text", { class: "xtitle", x: (left + width - side) / 2, y: height - 6, "text-anchor": "middle", "font-size": 13 }, across.title);
    if (yaxis.title) make(frame, "text", { class: "ytitle", "text-anchor": "middle", "font-size": 13, transform: `translate(13 ${(top + bottom) / 2}) rotate(-90)` }, yaxis.title);
    const inside = make(svg, "g", { "clip-path": `url(#${clip})` });
    const targets = []; // what can be pointed at: place, reach and words
    const bars = traces.filter((trace) => trace.type === "bar");
    const path = (places) => places.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
    traces.forEach((trace) => {
      const g = make(inside, "g", { class: `trace ${trace.type}` });
      if (trace.type === "heat") drawHeat(g, trace);
      else if (trace.type === "band") {
        const places = [...trace.x.map((v, i) => [x.at(v), y.at(trace.high[i])]), ...trace.x.map((v, i) => [x.at(v), y.at(trace.low[i])]).reverse()];
        make(g, "path", { d: `${path(places)}z`, fill: paint(trace.color), stroke: "none" });
      } else if (trace.type === "bar") {
        const thick = Math.min((0.75 * x.step) / bars.length, 72);
        const start = (bars.indexOf(trace) - bars.length / 2) * thick;
        trace.x.forEach((name, i) => {
          const [from, high] = [x.at(named.indexOf(name)) + start, y.at(trace.y[i])];
          make(g, "rect", { class: "point", x: from + 0.5, y: high, width: Math.max(thick - 1, 1), height: Math.max(bottom - high, 0.5), fill: paint(trace.color) });
          if (trace.arms) arm(g, from + thick / 2, trace.arms.y[i].map(y.at), paint("ink/0.7"));
          targets.push({ x: from + thick / 2, y: high, wide: thick / 2, foot: bottom, words: look.texts[trace.text[i]] });
        });
      } else drawLine(g, trace);
    });
    function arm(g, at, [low, high], stroke, flat) {
      if (Math.abs(high - low) < 0.5) return;
      const d = flat ? `M${low} ${at}H${high}M${low} ${at - 3}v6M${high} ${at - 3}v6` : `M${at} ${low}V${high}M${at - 3} ${low}h6M${at - 3} ${high}h6`;
      make(g, "path", { class: "arm", d, stroke, fill: "none", "stroke-width": 1.2 });
    }
    function drawLine(g, trace) {
      const places = trace.x.map((v, i) => [x.at(named.length ? named.indexOf(v) : v), y.at(trace.y[i])]);
      if (trace.line && places.length > 1) {
        const stroke = { stroke: paint(trace.line.color), fill: "none", "stroke-width": trace.line.width, "stroke-linejoin": "round" };
        if (trace.line.step) make(g, "path", { ...stroke, d: `${path(places.slice(0, 1))}${places.slice(1).map(([a, b]) => `H${a}V${b}`).join("")}`, "stroke-dasharray": DASHES[trace.line.dash] });
        else if (trace.until !== undefined) {
          // Until the structure settles the line is of networks that nobody ships: dotted.
          const split = trace.x.findIndex((v) => v >= trace.until);
          const end = split < 0 ? places.length - 1 : split;
          make(g, "path", { ...stroke, class: "before", d: path(places.slice(0, end + 1)), "stroke-dasharray": "2 4" });
          if (end < places.length - 1) make(g, "path", { ...stroke, class: "after", d: path(places.slice(end)) });
        } else make(g, "path", { ...stroke, d: path(places), "stroke-dasharray": DASHES[trace.line.dash] });
      }
      places.forEach(([a, b], i) => {
        for (const [kind, flat] of [["x", true], ["y", false]]) {
          if (trace.arms?.[kind]) arm(g, flat ? b : a, trace.arms[kind][i].map((flat ? x : y).at), paint(trace.arms.color), flat);
        }
        if (trace.marker) {
          const { symbol, size, color } = trace.marker;
          const open = symbol === "ring";
          make(g, "path", { class: "point", d: shape(symbol, a, b, size / 2), fill: open ? "none" : paint(color), stroke: open ? paint(color) : undefined, "stroke-width": 1.4 });
        }
        const value = (told[trace.hover?.format] || told.number)(trace.y[i]);
        const words = trace.text ? look.texts[trace.text[i]]
          : trace.hover ? `${trace.hover.label}\nupdate ${trace.x[i].toLocaleString("en")}\n${trace.hover.name} ${value}` : null;
        if (words) targets.push({ x: a, y: b, wide: 0, words });
      });
    }
    function drawHeat(g, trace) {
      const [rows, columns] = trace.shape;
      const bytes = Uint8Array.from(atob(trace.z), (sign) => sign.charCodeAt(0));
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [Math.round(width - side - left), rows];
      const context = canvas.getContext("2d");
      const image = context.createImageData(canvas.width, rows);
      const ramp = CIVIDIS.map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
      const nearest = (update) => {
        const after = trace.x.findIndex((v) => v >= update);
        if (after <= 0) return after < 0 ? columns - 1 : 0;
        return update - trace.x[after - 1] < trace.x[after] - update ? after - 1 : after;
      };
      for (let i = 0; i < canvas.width; i += 1) {
        const column = nearest(x.low + (x.high - x.low) * (i + 0.5) / canvas.width);
        for (let j = 0; j < rows; j += 1) {
          const place = (bytes[j * columns + column] / 100) * (ramp.length - 1);
          const k = Math.min(Math.floor(place), ramp.length - 2);
          for (let c = 0; c < 3; c += 1) image.data[4 * (j * canvas.width + i) + c] = ramp[k][c] + (ramp[k + 1][c] - ramp[k][c]) * (place - k);
          image.data[4 * (j * canvas.width + i) + 3] = 255;
        }
      }
      context.putImageData(image, 0, 0);
      make(g, "image", { href: canvas.toDataURL(), x: left, y: top, width: width - side - left, height: bottom - top, preserveAspectRatio: "none", style: "image-rendering: pixelated" });
      let row = 0;
      for (const [, count] of groups) {
        row += count;
        if (row < rows) make(g, "path", { d: `M${left} ${y.at(row)}H${width - side}`, stroke: palette.paper, "stroke-width": 2 });
      }
      const gradient = make(make(svg, "defs", {}), "linearGradient", { id: `${clip}-ramp`, x1: 0, y1: 1, x2: 0, y2: 0 });
      CIVIDIS.forEach((color, i) => make(gradient, "stop", { offset: i / (CIVIDIS.length - 1), "stop-color": color }));
      const bar = width - side + 10;
      make(svg, "rect", { x: bar, y: top + 16, width: 10, height: bottom - top - 16, fill: `url(#${clip}-ramp)` });
      make(frame, "text", { x: bar - 2, y: top + 8 }, "theta");
      for (const part of [0, 0.5, 1]) make(frame, "text", { x: bar + 14, y: bottom - part * (bottom - top - 16) + 4 }, part || "0");
      look.cell = (a, b) => {
        if (a < left || a > width - side || b < top || b > bottom) return null;
        const column = nearest(x.low + (x.high - x.low) * (a - left) / (width - side - left));
        const at = Math.min(Math.floor(rows * (b - top) / (bottom - top)), rows - 1);
        let group = groups[0][0];
        for (let i = 0, start = 0; i < groups.length; i += 1, start += groups[i - 1][1]) if (at >= start) [group] = groups[i];
        return { x: a, y: b, words: `${group}\nupdate ${trace.x[column].toLocaleString("en")}\ntheta ${bytes[at * columns + column]}%` };
      };
    }
    for (const mark of marks) {
      const at = x.at(mark.x);
      if (at < left || at > width - side) continue;
      const after = at < (left + width - side) / 2;
      make(svg, "path", { class: "moment", d: `M${at} ${top - 8}V${bottom}`, stroke: palette.quiet, "stroke-dasharray": "5 3" });
      make(svg, "text", { class: "moment", x: at + (after ? 6 : -6), y: top, "text-anchor": after ? "start" : "end", fill: palette.ink, stroke: palette.paper, "stroke-width": 4, "paint-order": "stroke" }, mark.text);
    }
    for (const label of labels) {
      if (look.hidden.has(label.group)) continue;
      const [a, b] = [x.at(label.x), y.at(label.y)];
      const place = label.beside ? { x: a + 10, y: b - 8, "text-anchor": "start" } : { x: a, y: b + 22, "text-anchor": "middle" };
      make(svg, "text", { class: "label", ...place, fill: paint(label.color), stroke: palette.paper, "stroke-width": 4, "paint-order": "stroke" }, label.text);
    }
    box.replaceChildren(svg);
    point(box, look, targets, width, height);
  }

  // A label beside what the pointer is near to; from the keyboard, arrows go from one thing to the next.
  function point(box, look, targets, width, height) {
    let label = null;
    let chosen = -1;
    const hide = () => { label?.remove(); label = null; };
    const show = (target) => {
      if (!target) return hide();
      if (!label) {
        label = document.createElement("div");
        label.className = "hover";
        label.setAttribute("role", "status");
        box.append(label);
      }
      const [first, ...rest] = target.words.split("\n");
      const head = document.createElement("strong");
      head.textContent = first;
      label.replaceChildren(head, ...rest.map((text) => Object.assign(document.createElement("span"), { textContent: text })));
      const zoom = box.clientWidth / width;
      const [a, b] = [target.x * zoom, target.y * zoom];
      label.style.left = `${Math.max(0, Math.min(a + 14, box.clientWidth - label.offsetWidth))}px`;
      label.style.top = b + 16 + label.offsetHeight < height + 60 ? `${b + 16}px` : `${b - 12 - label.offsetHeight}px`;
    };
    const near = (event) => {
      const frame = box.getBoundingClientRect();
      const [a, b] = [(event.clientX - frame.left) * width / frame.width, (event.clientY - frame.top) * height / frame.height];
      if (look.cell) return look.cell(a, b);
      let [best, least] = [null, 26];
      for (const target of targets) {
        const inside = target.wide && Math.abs(a - target.x) <= target.wide && b >= Math.min(target.y, target.foot - 12) && b <= target.foot;
        const far = inside ? 0 : Math.hypot(a - target.x, b - target.y);
        if (far < least) [best, least] = [target, far];
      }
      return best;
    };
    box.onpointermove = box.onpointerdown = (event) => show(near(event));
    box.onpointerleave = box.onblur = hide;
    box.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step || !targets.length) return;
      event.preventDefault();
      chosen = chosen < 0 && step < 0 ? targets.length - 1 : (chosen + step + targets.length) % targets.length;
      show(targets[chosen]);
    };
  }
  return Object.assign(draw, { shape, DASHES });
})();
