"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const info = document.getElementById("info");
const WINDOW = 240, WHOLE = 480; // tokens that are shown at once; rows of up to so many are shown whole
const theme = () => (dark.matches ? "dark" : "light");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const text = (at) => (data.texts === null ? String(data.ids[at]) : data.texts[at]);
const named = (at) => (data.texts === null ? "id " + data.ids[at] : "“" + data.texts[at] + "” (id " + data.ids[at] + ")");
const number = (value) => value.toLocaleString("en-US");
const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(3);

function make(tag, name, content) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (content !== undefined) element.textContent = content;
  return element;
}

function mixed(one, other, share) {
  let result = "#";
  for (const i of [1, 3, 5]) {
    const a = parseInt(one.slice(i, i + 2), 16), b = parseInt(other.slice(i, i + 2), 16);
    result += Math.round(a + (b - a) * share).toString(16).padStart(2, "0");
  }
  return result;
}

const advantageColour = (value) =>
  mixed(data.flat[theme()], (value > 0 ? data.up : data.down)[theme()], Math.min(1, Math.abs(value) / data.largest));

// Runs [value, count, …] with a way to the value at a place.
class Runs {
  constructor(flat) {
    this.values = [];
    this.stops = [];
    for (let i = 0, stop = 0; i < flat.length; i += 2) {
      this.values.push(flat[i]);
      this.stops.push((stop += flat[i + 1]));
    }
  }
  at(place) {
    return this.values[firstAbove(this.stops, place)];
  }
}

// The first index whose value is above x, in an ascending list.
function firstAbove(list, x) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] > x) high = middle;
    else low = middle + 1;
  }
  return low;
}

class Row {
  constructor(values, section) {
    Object.assign(this, values);
    this.segments = values.segments.map(([parent, depth, tree, begin, stop, end, sample, position, label], group) => ({
      group, parent, depth, tree, begin, stop, end, sample, position, label,
    }));
    this.used = this.tokens.length;
    this.depths = Math.max(1, ...this.segments.map((segment) => segment.depth + 1));
    this.stops = this.segments.map((segment) => segment.stop);
    this.longest = Math.max(1, ...this.segments.map((segment) => segment.position + segment.stop - segment.begin));
    for (const name of ["advantages", "weights", "versions"]) this[name] = new Runs(values[name]);
    this.starts = []; // of the runs of trained positions, and how many trained ones lie before each
    this.before = [];
    for (let i = 0, count = 0; i < this.trained.length; i += 2) {
      this.starts.push(this.trained[i]);
      this.before.push(count);
      count += this.trained[i + 1] - this.trained[i];
    }
    this.at = -1; // the position that the cursor is on
    this.first = -1; // of the tokens shown
    this.build(section.querySelector(".picture"));
  }

  segmentAt(position) {
    return this.segments[firstAbove(this.stops, position)];
  }

  // How many trained positions lie before this one, or -1 where nothing is trained.
  placeOf(position) {
    const run = firstAbove(this.starts, position) - 1;
    return run >= 0 && position < this.trained[2 * run + 1] ? this.before[run] + position - this.starts[run] : -1;
  }

  labelOf(position, segment) {
    return position + 1 < segment.stop ? this.tokens[position + 1] : segment.label;
  }

  colour(segment) {
    const levels = data.colours[theme()][segment.tree % data.colours[theme()].length];
    return levels[Math.min(segment.depth, levels.length - 1)];
  }

  path(segment) {
    const path = [segment.group];
    while (segment.parent !== segment.group) path.unshift((segment = this.segments[segment.parent]).group);
    return path;
  }

  owner(segment) {
    const [task, sample, reward, , finish] = data.samples[segment.sample];
    return `task ${task}, sample ${sample} · reward ${+reward.toPrecision(4)}` + (finish ? ` · ended by ${finish}` : "");
  }

  sharedBy(segment) {
    const below = this.segments.filter((one) => one.sample >= 0 && one.begin >= segment.begin && one.begin < segment.end);
    return `shared by ${below.length} samples`;
  }

  // What is known of a position: a heading, and lines of text.
  facts(position) {
    if (position >= this.used) {
      return ["padding", `row ${this.row}, positions ${number(this.used)} to ${number(data.positions - 1)}`];
    }
    const segment = this.segmentAt(position), place = this.placeOf(position), path = this.path(segment);
    const short = path.length > 9 ? [...path.slice(0, 2), "…", ...path.slice(-5)] : path;
    const lines = [
      `row ${this.row}, position ${number(position)} · position ${number(segment.position + position - segment.begin)} in the sample`,
      path.length > 1 ? `group ${segment.group}, path ${short.join(" › ")}` : `group ${segment.group}, a root`,
      segment.sample < 0 ? this.sharedBy(segment) : this.owner(segment),
    ];
    if (place < 0) lines.push("nothing is trained here");
    else {
      const logprob = this.logprobs[place], reference = this.reference && this.reference[place];
      const known = (value) => (value === null ? "unknown" : signed(value * data.logprobUnit));
      lines.push(
        "predicts " + named(this.labelOf(position, segment)) + (position + 1 === segment.stop ? ", the sample’s last" : ""),
        `advantage ${signed(this.advantages.at(place))} · logprob ${known(logprob)}` +
          (logprob === null ? "" : ` (p = ${Math.exp(logprob * data.logprobUnit).toPrecision(3)})`) +
          (this.reference ? ` · reference ${known(reference)}` : ""),
        `weight ${+this.weights.at(place).toPrecision(4)} · policy ${this.versions.at(place)}`,
      );
    }
    return [named(this.tokens[position]), lines.join("\n")];
  }

  build(parent) {
    this.overview = make("div", "overview");
    this.canvas = make("canvas");
    this.cursor = make("div", "cursor");
    this.window = make("div", "window");
    this.overview.append(this.canvas, this.cursor, this.window);
    this.previous = make("button", "", "‹ before");
    this.next = make("button", "", "after ›");
    this.toggle = make("button", "", "Tokens");
    this.where = make("span");
    this.bar = make("div", "bar");
    this.bar.append(this.toggle, this.previous, this.next, this.where);
    this.list = make("div", "tokens");
    parent.append(this.overview, this.bar, this.list);
    this.overview.tabIndex = 0;
    this.overview.setAttribute("role", "slider");
    this.overview.setAttribute("aria-label", `positions of row ${this.row}`);
    this.overview.setAttribute("aria-valuemin", "0");
    this.overview.setAttribute("aria-valuemax", String(data.positions - 1));
    this.overview.setAttribute("aria-valuenow", "0");
    this.measure();
    this.bar.hidden = this.used === 0;
    this.show(-1);

    const placed = (event) => {
      const box = this.overview.getBoundingClientRect();
      return Math.floor(((event.clientX - box.left - this.gutter) / (box.width - this.gutter)) * data.positions);
    };
    const inside = (position) => position >= 0 && position < data.positions;
    this.overview.addEventListener("pointermove", (event) => {
      const position = placed(event);
      if (event.pointerType !== "mouse") return;
      if (inside(position)) tell(this, position, event.clientX, event.clientY);
      else hide();
    });
    this.overview.addEventListener("pointerleave", hide);
    this.overview.addEventListener("click", (event) => {
      const position = placed(event);
      if (inside(position)) this.go(position, event);
    });
    this.overview.addEventListener("keydown", (event) => this.key(event));
    this.toggle.addEventListener("click", () => this.show(this.first < 0 ? Math.max(this.at, 0) : -1));
    this.previous.addEventListener("click", () => this.show(this.first - WINDOW));
    this.next.addEventListener("click", () => this.show(this.first + WINDOW));
    const tokenOf = (event) => event.target.closest("[data-at]");
    this.list.addEventListener("pointerover", (event) => {
      const element = tokenOf(event);
      if (event.pointerType !== "mouse") return;
      if (element) tell(this, +element.dataset.at, event.clientX, element.getBoundingClientRect().bottom);
      else hide();
    });
    this.list.addEventListener("pointerleave", hide);
    this.list.addEventListener("click", (event) => {
      const element = tokenOf(event);
      if (element) this.go(+element.dataset.at, event);
    });
  }

  key(event) {
    const segment = this.segmentAt(Math.max(this.at, 0)), last = Math.max(this.used - 1, 0);
    const group = segment ? segment.group : this.segments.length; // in padding: behind the last
    const begin = (one) => (this.segments[one] ? this.segments[one].begin : one < 0 ? 0 : last);
    const goal = {
      ArrowLeft: this.at - 1,
      ArrowRight: this.at + 1,
      ArrowUp: segment && this.at > segment.begin ? segment.begin : begin(group - 1),
      ArrowDown: begin(group + 1),
      PageUp: this.at - 50,
      PageDown: this.at + 50,
      Home: 0,
      End: last,
      Enter: this.at,
    }[event.key];
    if (goal === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.go(Math.min(Math.max(goal, 0), data.positions - 1), null);
  }

  // Puts the cursor on a position, shows its tokens and says what is known of it.
  go(position, event) {
    if (current && current !== this) current.place(-1);
    current = this;
    if (position < this.used) this.show(position);
    this.place(position);
    this.tellCursor(event && this.list.contains(event.target));
  }

  // Says what is known of the cursor's position, beside its token or below the overview.
  tellCursor(atToken) {
    const box = this.overview.getBoundingClientRect();
    const element = atToken && this.list.querySelector(`[data-at="${this.at}"]`);
    if (element) {
      const place = element.getBoundingClientRect();
      tell(this, this.at, place.left + 30, place.bottom);
    } else tell(this, this.at, box.left + this.gutter + ((this.at + 0.5) / data.positions) * (box.width - this.gutter), box.bottom);
    pointed = atToken;
  }

  place(position) {
    this.at = position;
    for (const element of this.list.querySelectorAll(".at")) element.classList.remove("at");
    this.cursor.style.display = position < 0 ? "none" : "block";
    if (position < 0) return;
    const share = (position + 0.5) / data.positions;
    this.cursor.style.left = `calc(${this.gutter}px + ${share} * (100% - ${this.gutter}px))`;
    this.overview.setAttribute("aria-valuenow", String(position));
    this.overview.setAttribute("aria-valuetext", this.facts(position).join(". ").replaceAll("\n", ". "));
    const element = this.list.querySelector(`[data-at="${position}"]`);
    if (element) element.classList.add("at");
  }

  // Shows the tokens around a position, or none for -1.
  show(position) {
    const whole = this.used <= WHOLE;
    const open = position >= 0 && this.used > 0;
    const first = !open ? -1 : whole ? 0 : Math.floor(Math.min(position, this.used - 1) / WINDOW) * WINDOW;
    const stop = whole ? this.used : Math.min(first + WINDOW, this.used);
    this.toggle.textContent = open ? "Hide tokens" : "Show tokens";
    this.toggle.setAttribute("aria-expanded", String(open));
    this.previous.hidden = this.next.hidden = !open || whole;
    this.previous.disabled = first <= 0;
    this.next.disabled = stop >= this.used;
    this.where.textContent = open ? `positions ${number(first)} to ${number(stop - 1)} of ${number(this.used)} tokens` : "";
    this.window.style.display = open && !whole ? "block" : "none";
    const share = (value) => `calc(${this.gutter}px + ${value / data.positions} * (100% - ${this.gutter}px))`;
    this.window.style.left = share(first);
    this.window.style.right = `calc(100% - ${share(stop)})`;
    if (first === this.first && open) return;
    this.first = first;
    this.list.replaceChildren();
    if (!open) return;
    for (let group = firstAbove(this.stops, first); group < this.segments.length && this.segments[group].begin < stop; group++) {
      this.list.append(this.block(this.segments[group], first, stop));
    }
    if (this.at >= 0) this.place(this.at);
  }

  // A segment's tokens that lie in the window.
  block(segment, first, stop) {
    const block = make("div", "segment"), words = make("div");
    const colour = this.colour(segment);
    block.style.marginLeft = `${Math.min(segment.depth, 12) * (innerWidth > 700 ? 22 : 8)}px`;
    block.style.borderColor = colour;
    const root = segment.parent === segment.group;
    const head = `group ${segment.group}` + (root ? "" : ` ‹ ${segment.parent}`);
    const cut = segment.begin < first ? " · … continued" : "";
    block.append(make("p", "", `${head} · ${segment.sample < 0 ? this.sharedBy(segment) : this.owner(segment)}${cut}`), words);
    const from = Math.max(segment.begin, first), to = Math.min(segment.stop, stop);
    for (let position = from; position < to; position++) {
      const element = make("span", data.texts === null ? "id" : "", text(this.tokens[position]) || "∅");
      element.dataset.at = position;
      element.style.background = colour;
      const place = this.placeOf(position);
      if (place >= 0) element.style.borderBottomColor = advantageColour(this.advantages.at(place));
      words.append(element);
      if (element.textContent.endsWith("↵")) words.append("\n");
    }
    if (to === segment.stop && segment.label >= 0) {
      const element = make("span", data.texts === null ? "id last" : "last", text(segment.label) || "∅");
      element.dataset.at = segment.stop - 1;
      words.append(element);
    }
    if (to < segment.stop) words.append(" …");
    return block;
  }

  measure() {
    this.gutter = innerWidth > 700 ? 76 : 0;
    const title = this.gutter ? 0 : 15;
    const level = Math.min(16, Math.max(3, 66 / this.depths));
    const heights = [["tree", Math.round(level * this.depths)], ["trained", 10], ["advantage", 36], ["position", 16]];
    this.lanes = {};
    let y = 0;
    for (const [name, height] of heights) {
      y += title;
      this.lanes[name] = [y, height];
      y += height + 5;
    }
    this.level = this.lanes.tree[1] / this.depths;
    this.height = y + 14;
    this.overview.style.height = `${this.height}px`;
  }

  draw() {
    const width = this.overview.clientWidth, ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const g = this.canvas.getContext("2d");
    g.scale(ratio, ratio);
    const left = this.gutter, scale = (width - left) / data.positions;
    const x = (position) => left + position * scale;
    const rect = (begin, stop, y, height, gap) => {
      const space = gap && (stop - begin) * scale > 3 ? 1 : 0;
      g.fillRect(x(begin), y, (stop - begin) * scale - space, height);
    };
    const ink = css("--ink"), muted = css("--muted"), card = css("--card"), faint = css("--faint");
    g.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    g.fillStyle = muted;
    for (const [name, [y, height]] of Object.entries(this.lanes)) {
      g.textBaseline = left ? "middle" : "bottom";
      g.fillText(name, 0, left ? y + height / 2 : y - 1);
    }
    const [treeY, treeHeight] = this.lanes.tree, [trainedY, trainedHeight] = this.lanes.trained;
    const [advantageY, advantageHeight] = this.lanes.advantage, [positionY, positionHeight] = this.lanes.position;
    g.fillStyle = faint;
    rect(0, this.used, trainedY, trainedHeight);
    const zero = advantageY + advantageHeight / 2;
    rect(0, this.used, zero - 0.5, 1);
    for (const segment of this.segments) {
      const y = treeY + segment.depth * this.level, height = this.level - (this.level > 6 ? 1 : 0);
      g.fillStyle = this.colour(segment);
      rect(segment.begin, segment.stop, y, height, segment.end === segment.stop);
      if (segment.end > segment.stop) {
        g.globalAlpha = 0.2;
        rect(segment.stop, segment.end, y, height, true);
        g.globalAlpha = 1;
      }
      g.fillStyle = muted; // how far into its sample each position is
      g.globalAlpha = 0.55;
      const base = positionY + positionHeight, up = (value) => base - (value / this.longest) * positionHeight;
      g.beginPath();
      g.moveTo(x(segment.begin), base);
      g.lineTo(x(segment.begin), up(segment.position));
      g.lineTo(x(segment.stop), up(segment.position + segment.stop - segment.begin));
      g.lineTo(x(segment.stop), base);
      g.fill();
      g.globalAlpha = 1;
      const label = `${segment.group}`;
      if (height >= 11 && (segment.stop - segment.begin) * scale > g.measureText(label).width + 8) {
        g.fillStyle = ink;
        g.textBaseline = "middle";
        g.fillText(label, x(segment.begin) + 4, y + height / 2 + 0.5);
      }
    }
    for (let i = 0; i < this.trained.length; i += 2) {
      g.fillStyle = ink;
      rect(this.trained[i], this.trained[i + 1], trainedY, trainedHeight);
      this.drawAdvantages(g, i / 2, zero, advantageHeight / 2, rect);
    }
    this.drawPadding(g, x, [treeY, treeHeight], muted);
    this.drawAxis(g, x, width, muted);
  }

  // Bars of one run of trained positions, one for each advantage in it.
  drawAdvantages(g, run, zero, size, rect) {
    const [begin, stop] = [this.trained[2 * run], this.trained[2 * run + 1]];
    const { values, stops } = this.advantages;
    const first = this.before[run], offset = begin - first;
    for (let i = firstAbove(stops, first), from = begin; from < stop; i++) {
      const to = Math.min(stop, stops[i] + offset), value = values[i];
      const height = Math.max(1, (Math.abs(value) / data.largest) * size);
      g.fillStyle = advantageColour(value);
      rect(from, to, value > 0 ? zero - height : value < 0 ? zero : zero - 1, value ? height : 2);
      from = to;
    }
  }

  drawPadding(g, x, [y, height], colour) {
    if (this.used >= data.positions) return;
    const begin = x(this.used), width = x(data.positions) - begin;
    g.save();
    g.beginPath();
    g.rect(begin, y, width, height);
    g.clip();
    g.strokeStyle = colour;
    g.globalAlpha = 0.45;
    for (let at = begin - height; at < begin + width; at += 6) {
      g.beginPath();
      g.moveTo(at, y + height);
      g.lineTo(at + height, y);
      g.stroke();
    }
    g.restore();
  }

  drawAxis(g, x, width, colour) {
    const wanted = Math.max(1, data.positions / ((width - this.gutter) / 90));
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = Math.max(1, power * [1, 2, 5, 10].find((one) => one * power >= wanted));
    g.fillStyle = colour;
    g.textBaseline = "bottom";
    for (let at = 0; at < data.positions; at += step) {
      const label = number(at), place = x(at);
      if (place + g.measureText(label).width > width) break;
      g.fillRect(place, this.height - 17, 1, 4);
      g.fillText(label, place + (at ? 2 : 0), this.height);
    }
  }

  clear() {
    this.canvas.width = this.canvas.height = 0; // gives its memory back
  }
}

let current = null; // the row that has the cursor
let pointed = false; // whether the cursor was put on a token, not on an overview

// Ends what pointing at something showed: back to what is known of the cursor, where there is one.
function hide() {
  info.style.display = "none";
  if (current && current.at >= 0) current.tellCursor(pointed);
}

function tell(row, position, x, y) {
  const [heading, lines] = row.facts(position);
  info.replaceChildren(make("b", "", heading), lines);
  info.style.display = "block";
  if (innerWidth <= 700) return; // it lies at the bottom of the screen
  const box = info.getBoundingClientRect(), edge = document.documentElement.clientWidth;
  const above = y + 12 + box.height > innerHeight ? Math.max(8, y - box.height - 34) : y + 12;
  info.style.left = `${Math.max(8, Math.min(x - 30, edge - box.width - 8))}px`;
  info.style.top = `${above}px`;
}

function drawKeys() {
  const colours = data.colours[theme()], ink = css("--ink");
  const stripes = (list) => `linear-gradient(90deg, ${list.map((c, i) => `${c} ${(100 * i) / list.length}% ${(100 * (i + 1)) / list.length}%`)})`;
  const style = (name, background) => (document.querySelector(`[data-key=${name}]`).style.background = background);
  style("trees", stripes(colours[0]));
  style("seen", colours[0][0] + "33");
  style("trained", ink);
  style("scale", `linear-gradient(90deg, ${data.down[theme()]}, ${data.flat[theme()]}, ${data.up[theme()]})`);
  style("padding", `repeating-linear-gradient(135deg, ${css("--muted")} 0 1px, transparent 1px 5px)`);
}

const rows = data.rows.map((values) => new Row(values, document.getElementById("row-" + values.row)));
const near = new Set();
const watch = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const row = rows.find((one) => one.overview === entry.target);
    if (entry.isIntersecting) near.add(row), row.draw();
    else if (near.delete(row)) row.clear();
  }
}, { rootMargin: "600px" });
for (const row of rows) watch.observe(row.overview);

function redraw() {
  drawKeys();
  for (const row of rows) {
    row.measure();
    const shown = row.first;
    row.first = -1;
    row.show(shown);
    if (row.at >= 0) row.place(row.at);
  }
  for (const row of near) row.draw();
}
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== drawnWidth) (drawnWidth = innerWidth), redraw(); // a phone's bars coming and going change the height alone
});
dark.addEventListener("change", redraw);
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (current) current.place(-1);
  current = null;
  hide();
});
addEventListener("scroll", hide, { passive: true });

drawKeys();
if (rows.length) rows[0].show(0);
// A link to a place: #row:position
const link = /^#([0-9]+):([0-9]+)$/.exec(location.hash);
const linked = link && rows.find((row) => row.row === +link[1]);
if (linked && +link[2] < data.positions) {
  linked.overview.scrollIntoView({ block: "center" });
  linked.overview.focus({ preventScroll: true });
  linked.go(+link[2], null);
}
