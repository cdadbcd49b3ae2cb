// The tree of one round: where its nodes lie, its picture, and the same as a table.
import { brief, hue, make } from "./answer.js";

const ROW = 24, LETTER = 7.3, LONGEST = 11, SMALLEST = 0.72, LARGEST = 1.25;

/** Tokens as they can be seen. */
const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +$/, "␣").trim();
const short = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);

/** A round's nodes, the root first, and at the end the token that the model added. */
export function nodes(round) {
  const { texts, parents, depths, mass, drafters, accepted } = round.tree;
  const found = texts.map((text, i) => ({
    text, parent: parents[i], depth: depths[i], mass: mass[i], drafter: drafters[i] && brief(drafters[i]),
    fate: i === 0 ? "root" : accepted.includes(i) ? "accepted" : "rejected",
  }));
  const bonus = round.pieces.find((piece) => piece.origin === "bonus");
  const parent = accepted.at(-1) ?? 0;
  const text = bonus?.text || (round.ends ? "⟨end⟩" : "…");
  if (bonus) found.push({ text, parent, depth: depths[parent] + 1, mass: 0, drafter: null, fate: "bonus" });
  return found;
}

/** Columns by depth, as wide as their longest text; a first child stays in its parent's row, others begin one. */
export function place(found) {
  const children = found.map(() => []), widths = [];
  found.forEach((node, i) => {
    node.label = short(visible(node.text));
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.label.length * LETTER + 42);
    if (i) children[node.parent].push(i);
  });
  const lefts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width, 14));
  let rows = 0;
  const put = (i) => {
    const node = found[i];
    node.x = lefts[node.depth];
    children[i].forEach(put);
    node.row = children[i].length ? found[children[i][0]].row : rows++;
    node.y = (node.row + 0.5) * ROW;
  };
  put(0);
  return { width: lefts.at(-1) + widths.at(-1), height: rows * ROW };
}

function shape(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

/** To the right from behind the text, or down from the circle and then to the right. */
function edge(from, to) {
  const behind = from.x + 16 + from.label.length * LETTER;
  const d = from.row === to.row
    ? `M${behind} ${from.y}H${to.x}`
    : `M${from.x} ${from.y}C${from.x} ${to.y} ${from.x} ${to.y} ${Math.min(behind, to.x - 8)} ${to.y}H${to.x}`;
  return shape("path", { d, class: `edge ${to.fate}` });
}

/** Draw a round into `box`. */
export function draw(box, round) {
  const found = nodes(round), { width, height } = place(found);
  const taken = found.filter((node) => node.fate === "accepted").map((node) => node.text).join("");
  const label = `${found.filter((node) => node.drafter).length} drafted tokens, ${round.tree.accepted.length} accepted`;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": taken ? `${label}: ${taken}` : label });
  const scale = Math.min(LARGEST, (box.clientWidth - 18) / width, (box.clientHeight - 18) / height);
  svg.style.width = `${width * Math.max(scale, SMALLEST)}px`;
  svg.append(...found.slice(1).map((node) => edge(found[node.parent], node)));
  for (const node of found) {
    const group = shape("g", { class: `node ${node.fate}` });
    if (node.drafter) group.dataset.hue = hue(node.drafter);
    const r = node.drafter ? 2.5 + 5.5 * Math.sqrt(node.mass) : 5;
    group.append(shape("title", {}, says(node)), shape("circle", { cx: node.x, cy: node.y, r }));
    group.append(shape("text", { x: node.x + 12, y: node.y + 4 }, node.label));
    svg.append(group);
  }
  box.replaceChildren(svg);
}

const says = (node) => [JSON.stringify(node.text), node.fate, node.drafter && `by ${node.drafter}, mass ${node.mass.toFixed(3)}`]
  .filter(Boolean).join(", ");

/** The same as a table. */
export function table(round) {
  const made = make("table"), head = made.createTHead().insertRow(), body = made.createTBody();
  for (const name of ["token", "after", "depth", "mass", "by", ""]) head.append(make("th", "", name));
  const found = nodes(round);
  for (const node of found.slice(1)) {
    const row = body.insertRow();
    const cells = [JSON.stringify(node.text), JSON.stringify(found[node.parent].text), node.depth,
      node.drafter ? node.mass.toFixed(3) : "", node.drafter ?? "the model", node.fate];
    for (const cell of cells) row.insertCell().textContent = cell;
  }
  return made;
}

/** Bars of the latest values, and optionally a line of others. */
export function bars(svg, values, line = []) {
  const most = 60, shown = values.slice(-most), over = line.slice(-most), top = Math.max(...shown, ...over, 1);
  const y = (value) => 40 - (38 * value) / top;
  svg.setAttribute("viewBox", `0 0 ${most * 5} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-label", `${values.length} rounds, the latest: ${values.slice(-8).join(", ")}`);
  const points = over.map((value, i) => `${i * 5 + 2},${y(value)}`).join(" ");
  svg.replaceChildren(
    ...shown.map((value, i) => shape("rect", { x: i * 5, y: y(value), width: 4, height: 40 - y(value) })),
    shape("polyline", { points }),
  );
}
