"use strict";
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  function make(name, className, text) {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e4) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  }

  function time(value) {
    return value < 1 ? `${Number((1000 * value).toPrecision(3))} ms` : `${Number(value.toPrecision(4))} s`;
  }

  function nearest(values, wanted) {
    let low = 0, high = values.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle; else high = middle;
    }
    return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
  }

  /* A line and a small box that follow the pointer; `content(box, fraction, y)` fills it and may move the line. */
  function follow(area, content) {
    const cursor = make("div", "cursor"), tip = make("div", "tip");
    cursor.hidden = tip.hidden = true;
    area.append(cursor, tip);
    area.addEventListener("pointermove", (event) => {
      const frame = area.getBoundingClientRect();
      const fraction = clamp((event.clientX - frame.left) / frame.width, 0, 1);
      tip.replaceChildren();
      const place = content(tip, fraction, event.clientY - frame.top);
      cursor.hidden = tip.hidden = tip.childNodes.length === 0;
      cursor.style.left = `${100 * place}%`;
      const left = place * frame.width;
      tip.style.left = `${left < frame.width / 2 ? Math.min(left + 12, frame.width - tip.offsetWidth) : Math.max(left - 12 - tip.offsetWidth, 0)}px`;
    });
    area.addEventListener("pointerleave", () => { cursor.hidden = tip.hidden = true; });
  }

  function row(name, value, colour) {
    const line = make("div"), label = make("span");
    if (colour) label.append(make("i", `key fill ${colour}`));
    label.append(name);
    line.append(label, make("b", "", value));
    return line;
  }

  function chart(figure) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const area = figure.querySelector(".area");
    let xs = [];
    for (const line of data.lines) { xs = line.x || xs; line.x = xs; }
    const width = data.high - data.low;
    follow(area, (tip, fraction) => {
      const wanted = data.low + fraction * width;
      const main = data.lines.find((line) => !line.sparse) || data.lines[0];
      const step = main.x[nearest(main.x, wanted)];
      tip.append(row("step", short(step)));
      for (const line of data.lines) {
        const place = nearest(line.x, wanted);
        if (line.sparse && Math.abs(line.x[place] - wanted) > 0.02 * width) continue;
        if (data.hide_zero && line.y[place] === 0) continue;
        tip.append(row(line.name, short(line.y[place]) + (data.unit ? ` ${data.unit}` : ""), line.colour));
      }
      return (step - data.low) / width;
    });
  }

  /* Round times for an axis `room` pixels wide. */
  function ticks(from, to, room) {
    const rough = (to - from) / Math.max(2, room / 110), size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * size >= rough) * size;
    const found = [];
    for (let at = Math.ceil(from / step); at * step <= to; at += 1) found.push(Number((at * step).toPrecision(6)));
    return found;
  }

  function trackPanel(panel) {
    const data = JSON.parse(panel.querySelector("script").textContent);
    const area = panel.querySelector(".area"), drawing = area.querySelector("svg");
    const [, , width, height] = drawing.getAttribute("viewBox").split(" ").map(Number);
    const marks = panel.querySelector(".xs"), brush = make("div", "brush");
    let from = 0, to = 1, pressed = null;
    brush.hidden = true;
    area.append(brush);
    area.tabIndex = 0;

    function show(a, b) {
      const span = clamp(b - a, 1e-4, 1);
      from = clamp(a, 0, 1 - span);
      to = from + span;
      drawing.setAttribute("viewBox", `${from * width} 0 ${span * width} ${height}`);
      let free = 0;
      for (const label of all(".steps span", panel)) {
        const place = (Number(label.dataset.at) - from) / span, left = place * area.clientWidth;
        const fits = place > -0.001 && left >= free - 1 && left + label.offsetWidth <= area.clientWidth;
        label.style.left = `${100 * place}%`;
        label.style.visibility = fits ? "" : "hidden";
        if (fits) free = left + label.offsetWidth;
      }
      marks.replaceChildren(...ticks(from * data.seconds, to * data.seconds, area.clientWidth).map((at) => {
        const label = make("span", "", `${at} s`);
        label.style.left = `${100 * (at / data.seconds - from) / span}%`;
        return label;
      }));
    }

    panel.zoom = (action) => {
      const middle = (from + to) / 2, half = (to - from) / 2;
      if (action === "in") show(middle - half / 2, middle + half / 2);
      else if (action === "out") show(middle - half * 2, middle + half * 2);
      else if (action === "reset") show(0, 1);
      else show(from, to);
    };
    const fractionOf = (event) => {
      const frame = area.getBoundingClientRect();
      return clamp((event.clientX - frame.left) / frame.width, 0, 1);
    };
    area.addEventListener("pointerdown", (event) => { if (event.button === 0) pressed = fractionOf(event); });
    area.addEventListener("pointermove", (event) => {
      if (pressed === null) return;
      const now = fractionOf(event);
      brush.hidden = false;
      brush.style.left = `${100 * Math.min(pressed, now)}%`;
      brush.style.width = `${100 * Math.abs(now - pressed)}%`;
    });
    window.addEventListener("pointerup", (event) => {
      if (pressed === null) return;
      const a = Math.min(pressed, fractionOf(event)), b = Math.max(pressed, fractionOf(event));
      pressed = null;
      brush.hidden = true;
      if (b - a > 0.01) show(from + a * (to - from), from + b * (to - from));
    });
    window.addEventListener("pointercancel", () => { pressed = null; brush.hidden = true; });
    area.addEventListener("dblclick", () => panel.zoom("reset"));
    area.addEventListener("keydown", (event) => {
      const move = (to - from) / 4;
      if (event.key === "+" || event.key === "=") panel.zoom("in");
      else if (event.key === "-") panel.zoom("out");
      else if (event.key === "0") panel.zoom("reset");
      else if (event.key === "ArrowLeft") show(from - move, to - move);
      else if (event.key === "ArrowRight") show(from + move, to + move);
      else return;
      event.preventDefault();
    });

    window.addEventListener("resize", () => panel.zoom("same"));
    panel.zoom("same");

    const goingOn = (spans, at) => spans.find(([begin, end]) => begin <= at && at <= end);
    follow(area, (tip, fraction, y) => {
      const at = (from + fraction * (to - from)) * data.seconds;
      tip.append(row("time", time(at)));
      let share = null;
      for (const [since, percent] of data.engine) { if (since <= at) share = percent; else break; }
      if (share !== null) tip.append(row("engine, slots at work", `${share} %`, "c1"));
      const colours = { trainer: "c2", weights: "c4", waiting: "c6", other: "c3" };
      for (const [name, spans] of Object.entries(data.tracks)) {
        const span = goingOn(spans, at);
        if (span) tip.append(row(`${name}: ${span[2]}`, time(span[1] - span[0]), colours[name]));
      }
      const groups = data.groups.rows[Math.floor((y - data.groups.top) / data.groups.row)] || [];
      const group = groups.find(([begin, , , end]) => begin <= at && (end === null || at <= end));
      if (group) tip.append(make("div", "note", group[4]));
      return fraction;
    });
  }

  function tracks(root) {
    const panels = all(".track-panel", root), tabs = all("[data-window]", root);
    panels.forEach(trackPanel);
    for (const tab of tabs) {
      tab.addEventListener("click", () => {
        for (const other of tabs) other.setAttribute("aria-pressed", String(other === tab));
        for (const panel of panels) panel.hidden = panel.dataset.panel !== tab.dataset.window;
        panels.find((panel) => !panel.hidden).zoom("same");
      });
    }
    for (const button of all("[data-zoom]", root)) {
      button.addEventListener("click", () => panels.find((panel) => !panel.hidden).zoom(button.dataset.zoom));
    }
  }

  function samples(root) {
    const page = 12, cards = all(".card", root), holder = root.querySelector(".cards");
    const controls = root.querySelector(".sample-controls"), more = root.querySelector(".more");
    const [order, step] = ["order", "step"].map((name) => controls.querySelector(`[name="${name}"]`));
    let shown = page;
    const by = (key, sign) => (a, b) => sign * (Number(a.dataset[key]) - Number(b.dataset[key]));
    const orders = { newest: by("step", -1), oldest: by("step", 1), best: by("reward", -1), worst: by("reward", 1) };
    function update() {
      const fitting = cards.filter((card) => !step.value || card.dataset.step === step.value).sort(orders[order.value]);
      holder.replaceChildren(...fitting.slice(0, shown));
      more.hidden = fitting.length <= shown;
      controls.querySelector(".count").textContent = `${Math.min(shown, fitting.length)} of ${fitting.length}`;
    }
    for (const choice of [order, step]) choice.addEventListener("change", () => { shown = page; update(); });
    more.addEventListener("click", () => { shown += page; update(); });
    window.addEventListener("beforeprint", () => { shown = Math.max(shown, page); update(); });
    controls.hidden = false;
    update();
  }

  function theme(button) {
    const root = document.documentElement, names = ["auto", "light", "dark"];
    const stored = () => { try { return localStorage.getItem("penstock-theme"); } catch { return null; } };
    function apply(name) {
      if (name === "auto") delete root.dataset.theme; else root.dataset.theme = name;
      button.textContent = `Theme: ${name}`;
    }
    let current = names.includes(location.hash.slice(1)) ? location.hash.slice(1) : stored();
    if (!names.includes(current)) current = "auto";
    apply(current);
    button.addEventListener("click", () => {
      current = names[(names.indexOf(current) + 1) % names.length];
      apply(current);
      try { localStorage.setItem("penstock-theme", current); } catch { /* a page from a file may not store anything */ }
    });
  }

  theme(document.querySelector(".theme"));
  all("figure.chart").forEach(chart);
  all(".tracks").forEach(tracks);
  all("#samples").forEach(samples);
})();
