"use strict";
// The report in a browser. All texts come from somebody's files: they become text nodes, never markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const report = data.report, audit = data.audit;
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg", PAGE = 10;
  const COLOURS = [0, 1, 2, 3, 4, 5, 6].map((n) => `var(--c${n})`);
  const DASHES = ["", "7 4", "2 3", "8 3 2 3", "12 4", "4 2", "1 4"];
  const named = report.edits.length > 0;
  const metrics = new Map(report.metrics.map((info) => [info.name, info]));
  const headline = report.choice ? report.choice.criteria.metrics[0] : report.metrics[0].name;
  const chosen = report.choice ? report.choice.scale : null;
  const judged = report.choice ? (chosen !== null ? chosen : report.choice.nearest) : null;
  // The slider's places: from no edit to the strongest.
  const order = report.scales.map((scale, place) => place);
  if (!named) order.sort((a, b) => Math.abs(report.scales[a]) - Math.abs(report.scales[b]));
  const state = { place: 0, metric: headline, split: "seen", book: "", sort: "order", find: "", page: 0 };

  // Making elements.

  function make(tag, options = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(options)) {
      if (key === "text") element.textContent = value;
      else if (key === "class") element.className = value;
      else element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  }

  function draw(tag, attributes = {}, ...children) {
    const element = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "text") element.textContent = value;
      else element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  }

  function number(value, digits, sign = false) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const rounded = value.toFixed(digits);
    const plain = Number(rounded) === 0 ? (0).toFixed(digits) : rounded;
    return ((sign && Number(plain) > 0 ? "+" : "") + plain).replace("-", "−");
  }

  const short = (scale) => (named ? (scale ? report.edits[scale - 1].name : "untouched") : number(scale, 6).replace(/\.?0+$/, ""));
  const span = (found, digits) => (found ? `${number(found.low, digits)} to ${number(found.high, digits)}` : "–");
  const title = (name) => metrics.get(name)?.title || name;
  const digits = (name) => Math.min(metrics.get(name)?.digits ?? 3, 3);
  const scaleNow = () => report.scales[order[state.place]];

  function scoreOf(book, scale, metric, split) {
    return report.scores.find((s) => s.book === book && s.scale === scale && s.metric === metric && s.split === split);
  }

  function referenceOf(book, name, metric, split) {
    return report.reference_scores.find(
      (s) => s.book === book && s.reference === name && s.metric === metric && s.split === split);
  }

  function fill(table, heads, rows, current = -1) {
    const row = make("tr");
    heads.forEach((head, n) => row.append(make("th", { text: head, scope: "col", class: n === current ? "now" : "" })));
    const body = make("tbody");
    for (const cells of rows) {
      const line = make("tr");
      cells.forEach((cell, n) => {
        const options = { class: n === current ? "now" : "" };
        const one = n ? make("td", options) : make("th", { ...options, scope: "row" });
        if (cell instanceof Node) one.append(cell); else one.textContent = cell;
        line.append(one);
      });
      body.append(line);
    }
    table.replaceChildren(make("thead", {}, row), body);
  }

  function choices(select, options, value) {
    select.replaceChildren(...options.map(([key, words]) => make("option", { value: key, text: words })));
    select.value = value;
  }

  // The verdict's reasons: R by each metric, drawn between untouched and never seen.

  const OUTCOMES = { forgotten: "as if never seen", known: "still known", overdone: "beyond never seen",
    unsure: "not sure", untestable: "hardly known before" };

  function reasons() {
    const verdict = report.choice && report.choice.verdict;
    if (!verdict) return;
    const criteria = report.choice.criteria, several = new Set(verdict.metrics.map((m) => m.book)).size > 1;
    const box = make("div", { class: "bars" });
    for (const found of verdict.metrics) {
      const name = title(found.metric) + (several ? `, ${found.book}` : "");
      const mood = found.outcome === "forgotten" ? "good-word" : found.outcome === "unsure" ? "" : "bad-word";
      const words = found.relative ? `R ${number(found.relative.value, 2)}: ${OUTCOMES[found.outcome]}` : OUTCOMES[found.outcome];
      box.append(make("span", { text: name }), bar(found.relative, criteria), make("span", { text: words, class: mood }));
    }
    for (const found of verdict.membership) {
      const level = found.reference ? found.reference.value : 0.5;
      const mood = found.outcome === "forgotten" ? "good-word" : found.outcome === "unsure" ? "" : "bad-word";
      box.append(make("span", { text: `Membership${several ? `, ${found.book}` : ""}` }),
        make("span", { text: `AUC ${number(found.auc.value, 2)} (${span(found.auc, 2)}), never seen ${number(level, 2)}` }),
        make("span", { text: OUTCOMES[found.outcome], class: mood }));
    }
    for (const book of new Set(verdict.retained.map((lost) => lost.book))) {
      const all = verdict.retained.filter((lost) => lost.book === book);
      const worst = all.reduce((a, b) => (b.lost.value > a.lost.value ? b : a));
      const outcomes = all.map((lost) => lost.outcome);
      const says = outcomes.includes("lost") ? "lost" : outcomes.includes("unsure") ? "not sure" : "kept";
      box.append(make("span", { text: `Keeps ${book}` }),
        make("span", { text: `loses at most ${number(100 * worst.lost.value, 1)} % (${title(worst.metric)})` }),
        make("span", { text: says, class: says === "kept" ? "good-word" : says === "lost" ? "bad-word" : "" }));
    }
    const edit = named ? `the edit “${short(judged)}”` : `λ = ${short(judged)}`;
    const which = chosen === null ? "No edit met the criteria. Shown is the nearest" : "Shown is the chosen one";
    $("reasons").replaceChildren(
      make("p", { class: "faint", text: `${which}, ${edit}, on the passages that did not choose it. ` +
        `R is 0 for the untouched model and 1 for one that never saw the book; the band from ${criteria.low} to ${criteria.high} counts as never seen.` }), box);
  }

  function bar(found, criteria) {
    const most = Math.max(1.5, found ? Math.min(found.high, 3) : 0) * 1.05, x = (value) => 10 + 280 * Math.max(0, Math.min(1, value / most));
    const image = draw("svg", { viewBox: "0 0 300 26", role: "img",
      "aria-label": found ? `R ${number(found.value, 2)}, interval ${span(found, 2)}` : "no R" });
    image.append(
      draw("rect", { x: x(criteria.low), y: 3, width: x(criteria.high) - x(criteria.low), height: 20, fill: "var(--c2)", opacity: 0.22 }),
      draw("line", { x1: x(0), x2: x(most), y1: 13, y2: 13, class: "grid" }),
      draw("line", { x1: x(1), x2: x(1), y1: 3, y2: 23, class: "axis", "stroke-dasharray": "3 3" }));
    if (found) image.append(
      draw("line", { x1: x(found.low), x2: x(found.high), y1: 13, y2: 13, stroke: "var(--text)", "stroke-width": 2 }),
      draw("circle", { cx: x(found.value), cy: 13, r: 5, fill: "var(--text)" }));
    return image;
  }

  // Tables of scores: one number a cell, intervals in a second table.

  function tables() {
    const { metric, split } = state, scale = scaleNow(), places = digits(metric);
    const references = report.references.map((info) => info.name);
    const label = named ? short(scale) : `λ = ${short(scale)}`;
    const heads = ["book", "untouched", ...(scale ? [label, "change"] : []),
      ...references.map((name) => (name === "reference" ? name : `reference: ${name}`))];
    const rows = [], spans = [];
    for (const book of report.books) {
      const before = scoreOf(book.name, 0, metric, split), here = scoreOf(book.name, scale, metric, split);
      if (!before || !here) continue;
      const others = references.map((name) => referenceOf(book.name, name, metric, split));
      const change = here.relative ? `${number(100 * here.relative.value, 1, true)} %` : here.difference ? number(here.difference.value, places, true) : "–";
      const name = `${book.name} (${book.role})`;
      rows.push([name, number(before.value.value, places), ...(scale ? [number(here.value.value, places), change] : []),
        ...others.map((other) => number(other ? other.value.value : null, places))]);
      const changed = here.relative ? { low: 100 * here.relative.low, high: 100 * here.relative.high } : here.difference;
      spans.push([name, span(before.value, places), ...(scale ? [span(here.value, places), span(changed, here.relative ? 1 : places)] : []),
        ...others.map((other) => span(other && other.value, places))]);
    }
    fill($("scores"), heads, rows, scale ? 2 : 1);
    fill($("intervals"), heads, spans, scale ? 2 : 1);
    const info = metrics.get(metric);
    $("metric-words").textContent = `${title(metric)}: ${info.definition}. ${info.higher ? "Higher" : "Lower"} means ` +
      `${info.kind === "memory" ? "better remembered" : "healthier"}. Intervals: ${Math.round(100 * report.settings.level)} %, over passages.`;
  }

  // Plots.

  const W = 520, H = 300, LEFT = 62, RIGHT = 14, TOP = 10, BOTTOM = 44;

  function ticks(low, high) {
    const raw = (high - low) / 5 || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= raw) || raw;
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
    return found;
  }

  function frame(image, y, low, high, label) {
    for (const at of ticks(low, high)) {
      image.append(draw("line", { x1: LEFT, x2: W - RIGHT, y1: y(at), y2: y(at), class: "grid" }),
        draw("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end", text: String(at).replace("-", "−") }));
    }
    image.append(draw("line", { x1: LEFT, x2: LEFT, y1: TOP, y2: H - BOTTOM, class: "axis" }),
      draw("line", { x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM, class: "axis" }),
      draw("text", { x: (LEFT + W - RIGHT) / 2, y: H - 6, "text-anchor": "middle", text: label }));
  }

  function legend(entries) {
    const box = make("div", { class: "bar" });
    for (const [words, colour, dash, mark] of entries) {
      const image = draw("svg", { viewBox: "0 0 34 12", width: 34, height: 12, "aria-hidden": "true" });
      image.style.width = "34px";
      if (mark) image.append(draw("circle", { cx: 17, cy: 6, r: 5, fill: mark === "open" ? "none" : colour, stroke: colour, "stroke-width": 2 }));
      else image.append(draw("line", { x1: 0, x2: 34, y1: 6, y2: 6, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dash }));
      const one = make("span", {}, image, ` ${words}`);
      box.append(one);
    }
    return box;
  }

  function curve() {
    const { metric, split } = state;
    const books = report.books.filter((book) => scoreOf(book.name, 0, metric, split));
    const values = [];
    for (const book of books) {
      for (const scale of report.scales) {
        const found = scoreOf(book.name, scale, metric, split);
        if (found) values.push(found.value.low, found.value.high);
      }
      for (const info of report.references) {
        const found = referenceOf(book.name, info.name, metric, split);
        if (found) values.push(found.value.value);
      }
    }
    const finite = values.filter(Number.isFinite);
    $("curve-title").textContent = `${title(metric)} of each book, ${split === "seen" ? "seen" : "held-out"} passages`;
    if (!finite.length) { $("curve").replaceChildren(make("p", { text: "Nothing was measured here." })); return; }
    let low = Math.min(...finite), high = Math.max(...finite);
    const room = (high - low) * 0.06 || 0.5; low -= room; high += room;
    const line = named ? order.map((_, n) => n) : report.scales;
    const sorted = order.slice().sort((a, b) => (named ? order.indexOf(a) - order.indexOf(b) : report.scales[a] - report.scales[b]));
    const at = (place) => (named ? order.indexOf(place) : report.scales[place]);
    const first = Math.min(...line), last = Math.max(...line), wide = last - first || 1;
    const x = (value) => LEFT + 12 + ((value - first) / wide) * (W - LEFT - RIGHT - 24);
    const y = (value) => H - BOTTOM - ((value - low) / (high - low)) * (H - TOP - BOTTOM);
    const image = draw("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title(metric)} against ${named ? "the edits" : "λ"}; the numbers are in the table above` });
    frame(image, y, low, high, named ? "edit, the gentlest first" : "λ");
    for (const value of named ? line : ticks(first, last)) {
      image.append(draw("text", { x: x(value), y: H - BOTTOM + 16, "text-anchor": "middle", text: String(value).replace("-", "−") }));
    }
    const entries = [];
    books.forEach((book, n) => {
      const colour = COLOURS[n % COLOURS.length], dash = DASHES[n % DASHES.length];
      const points = sorted.map((place) => [x(at(place)), scoreOf(book.name, report.scales[place], metric, split)]).filter(([, found]) => found);
      const upper = points.map(([px, found]) => `${px},${y(found.value.high)}`), lower = points.map(([px, found]) => `${px},${y(found.value.low)}`).reverse();
      image.append(draw("polygon", { points: [...upper, ...lower].join(" "), fill: colour, opacity: 0.15 }),
        draw("polyline", { points: points.map(([px, found]) => `${px},${y(found.value.value)}`).join(" "), fill: "none", stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dash }));
      for (const [px, found] of points) image.append(draw("circle", { cx: px, cy: y(found.value.value), r: 3.5, fill: colour }));
      const info = report.references[0], never = info && referenceOf(book.name, info.name, metric, split);
      if (never) image.append(draw("line", { x1: W - RIGHT - 16, x2: W - RIGHT, y1: y(never.value.value), y2: y(never.value.value), stroke: colour, "stroke-width": 4 }));
      entries.push([`${book.name} (${book.role})`, colour, dash]);
    });
    const now = x(at(order[state.place]));
    image.append(draw("line", { x1: now, x2: now, y1: TOP, y2: H - BOTTOM, class: "axis", "stroke-width": 1.5, "stroke-dasharray": "2 2" }));
    const note = report.references.length ? make("p", { class: "faint", text: `Short bars at the right edge: ${report.references[0].name}.` }) : "";
    $("curve").replaceChildren(image, legend(entries), note);
  }

  // Forgetting against keeping: the mean over books, each relative to the untouched model.

  function kept(change) {
    const parts = report.books.filter((b) => b.role === "retain" || b.role === "aligned").map((b) => change(b.name)).filter((v) => v !== null);
    return parts.length ? Math.min(...parts) : null;
  }

  function plane() {
    const info = metrics.get(headline), forget = report.books.find((book) => book.role === "forget");
    const ratio = (found, before) => (found && before && before.value.value ? found.value.value / before.value.value : null);
    const points = [];
    const add = (name, of, place) => {
      if (!forget) return;
      const score = of(forget.name), rest = kept((book) => ratio(of(book), scoreOf(book, 0, headline, "seen")));
      if (score && rest !== null) points.push({ name, x: score.value.value, y: 100 * rest, place });
    };
    order.forEach((place, n) => add(short(report.scales[place]), (book) => scoreOf(book, report.scales[place], headline, "seen"), n));
    for (const other of report.references) add(other.name, (book) => referenceOf(book, other.name, headline, "seen"), null);
    if (!points.length || info.nats || info.geometric) {
      $("plane").replaceChildren(make("p", { class: "faint", text: "This needs a book to forget, one to keep, and a score that starts at 0." }));
      return;
    }
    const xs = points.map((p) => p.x), ys = points.map((p) => p.y);
    const left = Math.min(0, ...xs), right = Math.max(...xs) * 1.05 || 1, low = Math.min(0, ...ys), high = Math.max(105, ...ys) * 1.02;
    const x = (value) => LEFT + ((value - left) / (right - left)) * (W - LEFT - RIGHT), y = (value) => H - BOTTOM - ((value - low) / (high - low)) * (H - TOP - BOTTOM);
    const image = draw("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "what is kept against what is still known of the forgotten book" });
    frame(image, y, low, high, `${title(headline)} of ${forget.name}: less is forgotten more`);
    for (const at of ticks(left, right)) image.append(draw("text", { x: x(at), y: H - BOTTOM + 16, "text-anchor": "middle", text: String(at) }));
    for (const point of points) {
      const isReference = point.place === null, now = point.place === state.place;
      const dot = draw("circle", { cx: x(point.x), cy: y(point.y), r: now ? 8 : 5, fill: isReference ? "none" : COLOURS[1], stroke: isReference ? COLOURS[0] : now ? "var(--text)" : COLOURS[1], "stroke-width": isReference || now ? 3 : 1, class: isReference ? "" : "hit" });
      dot.append(draw("title", { text: `${point.name}: ${number(point.x, 3)}, ${number(point.y, 0)} %` }));
      if (!isReference) dot.addEventListener("click", () => { state.place = point.place; show(); });
      image.append(dot);
      if (isReference || now) image.append(draw("text", { x: x(point.x) + 10, y: y(point.y) - 8, "text-anchor": x(point.x) > W * 0.7 ? "end" : "start", text: point.name }));
    }
    $("plane").replaceChildren(image, make("p", { class: "faint", text: "Up: what the kept book that lost most still has, in percent of the untouched model. Top left is the goal." }),
      legend([[named ? "edits" : "λ", COLOURS[1], "", "full"], ...(report.references.length ? [["reference models", COLOURS[0], "", "open"]] : [])]));
  }

  // Passages: what was written, word by word beside the true text.

  function common(words, truth) {
    const bare = (word) => word.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "");
    const a = words.map(bare), b = truth.map(bare), width = b.length + 1;
    const best = new Uint16Array((a.length + 1) * width);
    for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) {
      best[i * width + j] = a[i] && a[i] === b[j] ? 1 + best[(i + 1) * width + j + 1] : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
    const marked = new Set();
    for (let i = 0, j = 0; i < a.length && j < b.length;) {
      if (a[i] && a[i] === b[j]) { marked.add(i); i++; j++; }
      else if (best[(i + 1) * width + j] >= best[i * width + j + 1]) i++; else j++;
    }
    return marked;
  }

  function marked(text, truth) {
    const words = text.split(/\s+/).filter(Boolean).slice(0, 600), shared = common(words, truth.split(/\s+/).filter(Boolean).slice(0, 600));
    const line = make("p");
    let run = [], inside = false;
    const flush = () => {
      if (run.length) line.append(inside ? make("mark", { text: run.join(" ") }) : run.join(" "), " ");
      run = [];
    };
    words.forEach((word, n) => { if (shared.has(n) !== inside) { flush(); inside = shared.has(n); } run.push(word); });
    flush();
    if (!words.length) line.append(make("span", { class: "faint", text: "(nothing)" }));
    return line;
  }

  function passages() {
    const place = order[state.place], find = state.find.trim().toLowerCase();
    const at = (passage) => passage.at[place], start = (passage) => passage.at[order[0]];
    let found = report.passages.filter((p) => p.split === state.split && (!state.book || p.book === state.book));
    if (find) found = found.filter((p) => [p.prompt, p.answer, at(p).output].some((text) => text.toLowerCase().includes(find)));
    const value = (p) => at(p).values[state.metric] ?? NaN, change = (p) => value(p) - (start(p).values[state.metric] ?? NaN);
    const by = { high: (p) => -value(p), low: value, fell: change, rose: (p) => -change(p) }[state.sort];
    if (by) found = found.slice().sort((a, b) => by(a) - by(b));
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    state.page = Math.min(state.page, pages - 1);
    $("count").textContent = `${found.length} passage${found.length === 1 ? "" : "s"}, page ${state.page + 1} of ${pages}`;
    $("before").disabled = state.page === 0; $("after").disabled = state.page >= pages - 1;
    const untouched = place === order[0], label = named ? short(scaleNow()) : `λ = ${short(scaleNow())}`;
    $("list").replaceChildren(...found.slice(state.page * PAGE, (state.page + 1) * PAGE).map((p) => {
      const column = (head, text, values) => make("div", {}, make("h4", { text: values && Number.isFinite(values[state.metric]) ? `${head} · ${title(state.metric)} ${number(values[state.metric], digits(state.metric))}` : head }), text);
      const texts = make("div", { class: "texts" }, column("True text", make("p", { text: p.answer })),
        column("Untouched", marked(start(p).output, p.answer), start(p).values));
      if (!untouched) texts.append(column(label, marked(at(p).output, p.answer), at(p).values));
      for (const other of p.references) texts.append(column(other.reference === "reference" ? "Never saw it" : other.reference, marked(other.output, p.answer), other.values));
      return make("li", {}, make("p", { class: "prompt", text: `${p.book}: ${p.prompt} …` }), texts);
    }));
    $("passages").hidden = !report.passages.length;
  }

  // Controls, audit, and how it was measured.

  function controls() {
    const table = report.controls;
    if (!table) return;
    const box = $("controls");
    box.hidden = false;
    box.querySelector("p").textContent = `${table.sentence} Each number is the share of ${title(headline)} that a book lost.`;
    const rows = table.rows.filter((row) => row.kind !== "untouched").map((row) => [row.name, ...table.books.map((book) => {
      const found = row.scores.find((s) => s.book === book.name && s.metric === headline);
      return found && found.lost ? `${number(100 * found.lost.value, 1)} %` : "–";
    })]);
    fill(box.querySelector("table"), ["change", ...table.books.map((book) => `${book.name} (${book.role})`)], rows);
  }

  function utility() {
    if (!report.utility.length) return;
    const box = $("utility"), tasks = [...new Set(report.utility.map((s) => s.metric))];
    box.hidden = false;
    const heads = [...report.scales.map((scale) => (named ? "" : "λ = ") + short(scale)), ...report.references.map((info) => info.name)];
    const at = (s) => (s.scale !== null ? report.scales.indexOf(s.scale) : report.scales.length + report.references.findIndex((info) => info.name === s.reference));
    const cell = (s) => `${number(s.value.value, 3)}${s.scale === 0 ? "" : ` (${number(s.difference.value, 3, true)})`}`;
    const rows = tasks.map((task) => {
      const cells = heads.map(() => "–");
      for (const s of report.utility) if (s.metric === task) cells[at(s)] = cell(s);
      return [task, ...cells];
    });
    fill(box.querySelector("table"), ["task", ...heads], rows);
  }

  function audited() {
    if (!audit) return;
    const box = $("audit");
    box.hidden = false;
    box.querySelector("p").textContent = audit.sentence;
    fill(box.querySelector("table"), audit.heads, audit.rows);
  }

  function about() {
    const facts = [["Protocol", `${report.protocol.name}, ${report.protocol.hash}`], ["Model", report.model.slice(0, 12)], ["Edit", report.edit.slice(0, 40)],
      ...report.references.map((info) => ["Reference", `${info.name}, ${info.model.slice(0, 12)}`]),
      ...report.books.map((book) => [book.role, `${book.name}: ${book.seen} passages seen, ${book.held_out} held out`]),
      ["Leaks", `${report.leaks.in_prompts.length} of ${report.leaks.checked} answers stand in a prompt, ${report.leaks.in_training.length} held-out ones in the training text; ${report.left_out} passages were left out`],
      ["Intervals", `${Math.round(100 * report.settings.level)} % bootstrap over passages, ${report.settings.resamples} resamples, seed ${report.settings.seed}`],
      ["Time", `${number(report.timing.seconds, 0)} s in ${report.timing.processes} process${report.timing.processes > 1 ? "es" : ""}`],
      ["Versions", Object.entries(report.versions).map(([name, version]) => `${name} ${version}`).join(", ")]];
    $("facts").replaceChildren(...facts.flatMap(([head, words]) => [make("dt", { text: head }), make("dd", { text: words })]));
    $("definitions").replaceChildren(...report.metrics.flatMap((info) => [make("dt", { text: title(info.name) }),
      make("dd", { text: `${info.definition} (${info.higher ? "higher" : "lower"}: ${info.kind === "memory" ? "better remembered" : "healthier"})` })]));
  }

  function download(name, type, text) {
    const link = make("a", { download: name });
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function csv() {
    // A cell that begins like a formula would be one in a spreadsheet.
    const cell = (value) => { const text = String(value ?? ""); return `"${(typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? "'" : "") + text.replaceAll('"', '""')}"`; };
    const head = ["book", "split", named ? "edit" : "scale", "metric", "passages", "value", "low", "high"];
    const rows = report.scores.map((s) => [s.book, s.split, named ? short(s.scale) : s.scale, s.metric, s.n, s.value.value, s.value.low, s.value.high]);
    return [head, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
  }

  // Putting it together.

  function show() {
    const label = short(scaleNow()) + (scaleNow() === chosen && chosen !== null ? " (chosen)" : "");
    $("scale").value = state.place;
    $("scale-value").textContent = label;
    $("scale").setAttribute("aria-valuetext", `${named ? "" : "λ "}${label}`);
    tables(); curve(); plane(); passages();
  }

  function start() {
    for (const section of document.querySelectorAll(".needs-script")) if (!["controls", "audit", "utility"].includes(section.id)) section.hidden = false;
    if (named) $("scale-noun").textContent = "Edit";
    const slider = $("scale");
    slider.min = 0; slider.max = order.length - 1;
    state.place = Math.max(0, judged === null ? 0 : order.findIndex((place) => report.scales[place] === judged));
    const splits = [["seen", "seen in training"], ["held_out", "held out"]].filter(([split]) => report.scores.some((s) => s.split === split));
    if (!splits.some(([split]) => split === "seen") && splits.length) state.split = splits[0][0];
    choices($("metric"), report.metrics.map((info) => [info.name, title(info.name)]), state.metric);
    choices($("split"), splits, state.split);
    const forget = report.books.find((book) => book.role === "forget");
    state.book = forget ? forget.name : "";
    choices($("book"), [["", "all"], ...report.books.map((book) => [book.name, `${book.name} (${book.role})`])], state.book);
    choices($("sort"), [["order", "place in the book"], ["high", "highest value"], ["low", "lowest value"], ["fell", "fell most"], ["rose", "rose most"]], state.sort);
    slider.addEventListener("input", () => { state.place = Number(slider.value); show(); });
    for (const key of ["metric", "split"]) $(key).addEventListener("change", (event) => { state[key] = event.target.value; state.page = 0; show(); });
    for (const key of ["book", "sort"]) $(key).addEventListener("change", (event) => { state[key] = event.target.value; state.page = 0; passages(); });
    $("find").addEventListener("input", (event) => { state.find = event.target.value; state.page = 0; passages(); });
    $("before").addEventListener("click", () => { state.page--; passages(); });
    $("after").addEventListener("click", () => { state.page++; passages(); });
    $("save-json").addEventListener("click", () => download("report.json", "application/json", JSON.stringify(report, null, 1) + "\n"));
    $("save-csv").addEventListener("click", () => download("scores.csv", "text/csv", csv()));
    reasons(); utility(); controls(); audited(); about(); show();
  }

  start();
})();
