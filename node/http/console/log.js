// A log as its segments, and its dirty ratio over time.
import { bytes, count, drawn, make, percent, plural } from "./dom.js";

const KINDS = ["clean", "dirty", "active", "closed"];
const SAYS = { clean: "clean: the cleaner has seen it", dirty: "dirty: appended since", active: "active: being written", closed: "closed: not compacted" };

export function legend(kinds, cleaning) {
  const shown = KINDS.filter((kind) => kinds.has(kind));
  return make("ul", { class: "legend" },
    shown.map((kind) => make("li", {}, make("span", { class: "key " + kind, "aria-hidden": "true" }), SAYS[kind])),
    cleaning ? make("li", {}, make("span", { class: "key mover", "aria-hidden": "true" }), "the cleaner") : null);
}

export const kindsOf = (partitions) => new Set(partitions.flatMap((one) => (one.segments || []).map((segment) => segment.kind)));

export function log(partition, big = false) {
  const segments = partition.segments || [], numbers = {};
  const parts = segments.map((segment) => {
    const kind = KINDS.includes(segment.kind) ? segment.kind : "closed";
    numbers[kind] = (numbers[kind] || 0) + 1;
    const part = make("span", { class: kind, title: `${kind}: offsets ${count(segment.base_offset)} to ${count(segment.next_offset)}, ${bytes(segment.size_bytes)}` });
    part.style.flexGrow = String(Math.max(segment.size_bytes, 1));
    return part;
  });
  const status = partition.compaction;
  const running = status && status.state === "running" && status.progress !== null;
  const said = KINDS.filter((kind) => numbers[kind]).map((kind) => `${numbers[kind]} ${kind}`).join(", ");
  const label = `Log of ${plural(segments.length, "segment")}: ${said}${running ? `; the cleaner is at ${percent(status.progress)}` : ""}`;
  const row = make("div", { class: big ? "log big" : "log", role: "img", "aria-label": label }, parts);
  if (running) {
    const range = cleaned(segments, status.cleaning_to);
    const mover = make("i", { class: "cleaner", "data-range": range }), swept = make("i", { class: "swept", "data-range": range });
    row.append(swept, mover);
    advance(row, status.progress);
  }
  return row;
}

// Which share of the drawing the pass covers.
function cleaned(segments, end) {
  const size = (list) => list.reduce((sum, segment) => sum + Math.max(segment.size_bytes, 1), 0);
  return size(segments.filter((segment) => segment.next_offset <= end)) / size(segments) || 1;
}

export function advance(row, progress) {
  for (const [name, side] of [[".cleaner", "left"], [".swept", "width"]]) {
    const element = row.querySelector(name);
    if (element) element.style[side] = `${(100 * progress * Number(element.dataset.range)).toFixed(1)}%`;
  }
}

const WIDTH = 600, HEIGHT = 100;

export function overTime(samples, target) {
  const known = samples.filter((sample) => sample.dirty_ratio !== null && sample.dirty_ratio !== undefined);
  if (known.length < 2) return make("p", { class: "quiet small" }, "Dirty ratio over time: a sample every 15 seconds is drawn here once there are two.");
  const first = known[0].at_ms, last = known[known.length - 1].at_ms;
  const x = (sample) => (WIDTH * (sample.at_ms - first) / Math.max(last - first, 1)).toFixed(1);
  const y = (ratio) => (HEIGHT - 2 - (HEIGHT - 4) * Math.min(ratio, 1)).toFixed(1);
  const points = known.map((sample) => `${x(sample)},${y(sample.dirty_ratio)}`).join(" ");
  const minutes = Math.max(1, Math.round((last - first) / 60000));
  const now = known[known.length - 1].dirty_ratio, highest = Math.max(...known.map((sample) => sample.dirty_ratio));
  const label = `Dirty ratio over the last ${plural(minutes, "minute")}: now ${percent(now)}, at most ${percent(highest)}; compaction is due above ${percent(target)}`;
  return make("figure", { class: "small" },
    drawn("svg", { class: "line", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      drawn("line", { class: "base", x1: 0, x2: WIDTH, y1: y(0), y2: y(0) }),
      drawn("polygon", { class: "area", points: `0,${y(0)} ${points} ${WIDTH},${y(0)}` }),
      drawn("line", { class: "target", x1: 0, x2: WIDTH, y1: y(target), y2: y(target) }),
      drawn("polyline", { class: "ratio", points })),
    make("figcaption", { class: "scale" }, make("span", {}, `${plural(minutes, "minute")} ago`), make("span", {}, `dirty ratio, due above ${percent(target)}`), make("span", {}, `now ${percent(now)}`)));
}
