"use strict";
// Shows, of the round that is pointed at, its draft tree and what it cost.  Text reaches the page as text nodes only.

const SVG = "http://www.w3.org/2000/svg";
const SOURCES = ["target", "drafter", "lookup", "both"]; // 1 is the drafter, 2 a match with earlier text, 3 both
const PROPOSERS = ["", "the drafter", "a match with earlier text", "the drafter and a match with earlier text"];
const KINDS = ["", "bytes", "control"];
const STATES = { root: "last token", drawn: "drawn", accepted: "accepted", refused: "not drawn" };
const GAP = 22, ROW = 50, HEIGHT = 40, TOP = 26, LONGEST = 18; // LONGEST in characters, the others in pixels
const CHARACTER = 7.9, SMALL = 6.7, INSET = 9, GLYPH = 16; // widths of letters, and where texts stand in a box
const SMALLEST = 0.78; // a tree that is too wide is drawn smaller, but no smaller than this
const HOVER = 120; // ms that the pointer rests before a round is shown: on its way to the drawing it crosses others

const data = JSON.parse(document.getElementById("data").textContent);

// ---- elements

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** A token on one line: line breaks, tabs and spaces at its ends as signs. */
function label(text) {
  const line = text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return line.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}

function short(text) {
  const characters = [...text];
  return characters.length > LONGEST ? characters.slice(0, LONGEST - 1).join("") + "…" : text;
}

/** Columns that a text takes in a monospaced font, about. */
const columns = (text) => [...text].reduce((sum, c) => sum + (c.codePointAt(0) > 0x2e7f ? 2 : 1), 0);

function percent(share) {
  if (share < 0.001) return "<0.1%";
  return share < 0.0995 ? `${(100 * share).toFixed(1)}%` : `${Math.round(100 * share)}%`;
}

const milliseconds = (value) => `${value >= 100 ? Math.round(value) : value.toFixed(1)} ms`;

/** The same with every time on one line. */
const unbroken = (sentence) => sentence.replace(/(\d) (m?s)\b/g, "$1\u00a0$2");

// ---- the tree

/** Boxes of a round's tree, parents first: the root, the proposals, and the token that the target drew behind them. */
function boxes(answer, round) {
  if (round.root === null) return [];
  const accepted = new Set(round.accepted);
  const found = [{ token: round.root, state: "root", source: 0, own: null, path: null, parent: -1, depth: 0 }];
  round.tree.forEach(([token, parent, own, path, source], i) => {
    const depth = found[parent + 1].depth + 1;
    const state = accepted.has(i) ? "accepted" : "refused";
    found.push({ token, state, source, own, path, parent: parent + 1, depth });
  });
  if (round.drawn !== null) {
    const parent = round.accepted.length ? round.accepted.at(-1) + 1 : 0;
    const depth = found[parent].depth + 1;
    found.push({ token: round.drawn, state: "drawn", source: 0, own: null, path: null, parent, depth });
  }
  for (const box of found) {
    box.text = label(answer.texts[box.token][0]);
    box.children = [];
    if (box.parent >= 0) found[box.parent].children.push(box);
  }
  place(found);
  return found;
}

/** Gives every box its row (a first child stands beside its parent) and, by depth, its x and width. */
function place(found) {
  let rows = 0;
  const settle = (box) => {
    const below = box.children.map(settle);
    box.row = below.length ? below[0] : rows++;
    return box.row;
  };
  settle(found[0]);
  const widths = [];
  for (const box of found) {
    const text = GLYPH + CHARACTER * columns(short(box.text)), below = SMALL * odds(box).length;
    widths[box.depth] = Math.max(widths[box.depth] ?? 0, 2 * INSET + Math.max(text, below));
  }
  for (const box of found) {
    box.width = widths[box.depth];
    box.x = 2 + widths.slice(0, box.depth).reduce((sum, width) => sum + width + GAP, 0);
    box.y = TOP + ROW * box.row;
  }
}

function odds(box) {
  if (box.state === "root") return "last token";
  if (box.state === "drawn") return "own draw";
  if (box.own === null) return "match";
  return box.depth === 1 ? percent(box.own) : `${percent(box.own)} · ${percent(box.path)}`;
}

function drawNode(box) {
  const source = SOURCES[box.source];
  return draw("g", { class: `node ${box.state} ${source}` },
    draw("title", {}, inWords(box)),
    draw("rect", { x: box.x, y: box.y, width: box.width, height: HEIGHT, rx: box.source ? 9 : 2 }),
    ...(box.state === "root" ? [] : [draw("use", {
      href: `#glyph-${source}`, class: `glyph ${source}`, x: box.x + INSET, y: box.y + 8, width: 11, height: 11,
    })]),
    draw("text", { x: box.x + INSET + (box.state === "root" ? 0 : GLYPH), y: box.y + 18 }, short(box.text)),
    draw("text", { x: box.x + INSET, y: box.y + 33, class: "odds" }, odds(box)));
}

function drawEdge(from, to) {
  const x1 = from.x + from.width, x2 = to.x, middle = (x1 + x2) / 2;
  const y1 = from.y + HEIGHT / 2, y2 = to.y + HEIGHT / 2;
  const path = `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  return draw("path", { class: `edge ${to.state} ${SOURCES[to.source]}`, d: path });
}

function drawTree(found, name) {
  const last = Math.max(...found.map((box) => box.x + box.width));
  const bottom = Math.max(...found.map((box) => box.y + HEIGHT));
  const tops = new Map(found.map((box) => [box.depth, box.x]));
  const level = ([depth, x]) => draw("text", { x, y: 15, class: "level" }, depth ? `depth ${depth}` : "so far");
  const edges = found.slice(1).map((box) => drawEdge(found[box.parent], box));
  const order = (path) => path.classList.contains("accepted") ? 1 : 0; // above the thin ones
  edges.sort((a, b) => order(a) - order(b));
  const width = Math.ceil(last + 2), height = bottom + 4;
  const svg = draw("svg", { width, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name },
    ...[...tops].map(level), ...edges, ...found.map(drawNode));
  svg.style.minWidth = `${SMALLEST * width}px`;
  return svg;
}

/** What a box is, for the list and for who points at it. */
function inWords(box) {
  if (box.state === "root") return `“${box.text}”, the last token so far`;
  if (box.state === "drawn") return `“${box.text}”, drawn by the target, not proposed there`;
  const known = box.own === null ? "" : `, ${percent(box.own)} after its parent, ${percent(box.path)} for the whole path`;
  return `“${box.text}”, by ${PROPOSERS[box.source]}${known}, ${STATES[box.state]}`;
}

function listTree(children) {
  const item = (box) => make("li", { class: `${box.state} ${SOURCES[box.source]}` },
    make("b", {}, box.text), make("span", {}, inWords(box).slice(box.text.length + 2)),
    ...(box.children.length ? [listTree(box.children)] : []));
  return make("ul", {}, ...children.map(item));
}

// ---- what it cost

function costs(round) {
  if (!round.ms) return [];
  const { draft, verify, rest, all, plain } = round.ms;
  const longest = Math.max(all, plain ?? 0) || 1;
  const part = (name, value) => {
    const bar = make("span", { class: name });
    bar.style.width = `${(100 * value) / longest}%`;
    return bar;
  };
  const key = (name, words, value) =>
    make("span", {}, make("i", { class: name }), `${words} ${milliseconds(value)}`);
  const rows = `${round.rows} ${round.rows === 1 ? "row" : "rows"}`;
  const lines = [
    make("span", {}, "this round"),
    make("span", { class: "bar" }, part("draft", draft), part("verify", verify), part("rest", rest)),
    make("b", {}, milliseconds(all)),
  ];
  if (plain !== null) {
    lines.push(make("span", {}, "plain decoding"), make("span", { class: "bar" }, part("plain", plain)),
      make("b", {}, milliseconds(plain)));
  }
  const keys = [key("draft", "drafting", draft), key("verify", `verifying ${rows}`, verify), key("rest", "the rest", rest)];
  return [...lines, make("span", { class: "key" }, ...keys)];
}

// ---- an answer

function tokenOf(answer, [id, source]) {
  const [text, kind] = answer.texts[id];
  const lines = text.split("\n").flatMap((line, i) =>
    i ? [make("i", { class: "break", "aria-hidden": "true" }), "\n", line] : [line]);
  const token = make("span", { class: `token ${SOURCES[source]} ${KINDS[kind]}`.trim(), role: "button", tabindex: "-1" }, ...lines);
  if (!text.trim()) token.setAttribute("aria-label", text.includes("\n") ? "line break" : "space");
  return token;
}

/** One answer on the page; `show` is the only thing that changes it. */
function view(section, answer) {
  const last = answer.rounds.length - 1;
  const groups = answer.rounds.map((round, number) => {
    const tokens = round.emitted.map((emitted) => tokenOf(answer, emitted));
    return make("span", { class: "round", role: "group", "aria-label": round.label, "data-round": number }, ...tokens);
  });
  fill(section.querySelector(".text"), { role: "group", "aria-label": "The answer, round by round" }, []).replaceChildren(...groups);

  const title = make("h3"), words = make("ol", { class: "words" }), cost = make("div", { class: "costs" });
  const tree = make("div", { class: "tree", tabindex: "0", role: "group", "aria-label": "Draft tree" });
  const nodes = make("div"), back = make("button", { "aria-label": "Previous round" }, "←");
  const next = make("button", { "aria-label": "Next round" }, "→");
  const list = make("details", { class: "nodes" }, make("summary", {}, "The tree as a list"), nodes);
  const hint = make("p", { class: "hint" }, "Point at a token, or walk with ← → Home End. A click holds a round, Esc lets go. " +
    "Below a proposal: the drafter's probability after its parent · of the whole path. ␣ is a space.");
  const panel = section.querySelector(".panel");
  panel.append(make("div", { class: "head" }, title, back, next), words, tree, cost, list, hint);
  panel.hidden = false;

  const self = { section, shown: -1, held: false, show, hold, last };

  function show(number, focus = false) {
    number = Math.min(Math.max(number, 0), last);
    const round = answer.rounds[number];
    groups[self.shown]?.classList.remove("shown");
    groups[self.shown]?.firstChild?.setAttribute("tabindex", "-1");
    self.shown = number;
    groups[number].classList.add("shown");
    groups[number].firstChild?.setAttribute("tabindex", "0");
    if (focus) groups[number].firstChild?.focus();

    const found = boxes(answer, round);
    title.replaceChildren(round.name, ...(self.held ? [make("span", { class: "held" }, "held")] : []));
    words.replaceChildren(...round.words.map((sentence) => make("li", {}, unbroken(sentence))));
    tree.replaceChildren(...(found.length ? [drawTree(found, round.label)] : []));
    cost.replaceChildren(...costs(round));
    nodes.replaceChildren(...(found.length ? [listTree([found[0]])] : []));
    list.hidden = !found.length;
    back.disabled = number === 0;
    next.disabled = number === last;
  }

  function hold(number) {
    self.held = number !== null;
    show(number ?? self.shown);
  }

  back.addEventListener("click", () => show(self.shown - 1));
  next.addEventListener("click", () => show(self.shown + 1));
  return self;
}

/** The round in which most was accepted: the best to begin with. */
function busiest(answer) {
  const accepted = answer.rounds.map((round) => round.accepted.length);
  return accepted.indexOf(Math.max(...accepted));
}

// ---- pointer, keys, address

const views = [...document.querySelectorAll(".answer")].map((section, i) => view(section, data[i]));
let current = views[0], waiting = 0;

/** The view and the number of the round that an element belongs to; null where there is none. */
function roundAt(element) {
  const round = element.closest?.(".round");
  const found = round && views.find((view) => view.section.contains(round));
  return found ? { view: found, number: Number(round.dataset.round) } : null;
}

document.addEventListener("pointerover", ({ target }) => {
  clearTimeout(waiting);
  const at = roundAt(target);
  if (at && !at.view.held) waiting = setTimeout(() => at.view.show(at.number), HOVER);
});

document.addEventListener("click", ({ target }) => {
  const at = roundAt(target);
  if (!at) return;
  clearTimeout(waiting);
  current = at.view;
  at.view.hold(at.view.held && at.view.shown === at.number ? null : at.number);
});

document.addEventListener("focusin", ({ target }) => {
  const found = views.find((view) => view.section.contains(target));
  current = found ?? current;
  const at = roundAt(target);
  if (at && !at.view.held && at.number !== at.view.shown) at.view.show(at.number);
});

const STEPS = {
  ArrowLeft: (view) => view.shown - 1,
  ArrowRight: (view) => view.shown + 1,
  Home: () => 0,
  End: (view) => view.last,
};

document.addEventListener("keydown", (event) => {
  const { key, target } = event;
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || target.closest?.(".tree, .scroll")) return;
  const token = target.closest?.(".token");
  if (key === "Escape") current.hold(null);
  else if (STEPS[key] && (token || key.startsWith("Arrow"))) {
    if (token) current = roundAt(token).view;
    current.show(STEPS[key](current), Boolean(token));
  } else if ((key === "Enter" || key === " ") && token) token.click();
  else return;
  event.preventDefault();
});

/** #round=3 or #answer=2&round=3; answers count from 1. */
function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const found = views[Number(wanted.get("answer") ?? 1) - 1];
  const number = Number(wanted.get("round") ?? NaN);
  if (!found || !Number.isInteger(number)) return;
  current = found;
  found.show(number);
}

views.forEach((view, i) => view.show(busiest(data[i])));
addEventListener("hashchange", follow);
follow();
