// A log as its segments, and its dirty ratio over time.
import { chart } from "./charts.js";
import { bytes, count, make, percent, plural } from "./dom.js";

const KINDS = ["clean", "dirty", "active", "closed"];
const MEANINGS = {
  clean: "clean: compacted",
  dirty: "dirty: appended since",
  active: "active segment",
  closed: "closed: not compacted",
};

export function legend(kinds, cleaning) {
  const key = (kind) => make("span", { class: "key " + kind, "aria-hidden": "true" });
  return make("ul", { class: "legend" },
    KINDS.filter((kind) => kinds.has(kind)).map((kind) => make("li", {}, key(kind), MEANINGS[kind])),
    cleaning ? make("li", {}, key("mover"), "the log cleaner") : null);
}

export const kindsOf = (partitions) =>
  new Set(partitions.flatMap((one) => (one.segments || []).map((segment) => segment.kind)));

function part(segment, kind) {
  const range = `offsets ${count(segment.base_offset)} to ${count(segment.next_offset)}`;
  const made = make("span", { class: kind, title: `${kind}: ${range}, ${bytes(segment.size_bytes)}` });
  made.style.flexGrow = String(Math.max(segment.size_bytes, 1));
  return made;
}

export function log(partition, big = false) {
  const segments = partition.segments || [];
  const kinds = segments.map((segment) => KINDS.includes(segment.kind) ? segment.kind : "closed");
  const status = partition.compaction;
  const running = status && status.state === "running" && status.progress !== null;
  const number = (kind) => kinds.filter((other) => other === kind).length;
  const said = KINDS.filter(number).map((kind) => `${number(kind)} ${kind}`).join(", ");
  const text = `Log of ${plural(segments.length, "segment")}: ${said}` +
    (running ? `; the cleaner is at ${percent(status.progress)}` : "");
  const row = make("div", { class: big ? "log big" : "log", role: "img", "aria-label": text },
    segments.map((segment, i) => part(segment, kinds[i])));
  if (running) {
    const range = cleaned(segments, status.cleaning_to);
    row.append(
      make("i", { class: "swept", "data-range": range }),
      make("i", { class: "cleaner", "data-range": range }),
    );
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

export const dirtyRatio = (samples, target) =>
  chart("dirty-ratio", "Dirty ratio", samples, "dirty_ratio", {
    show: percent, top: 1, steps: true, target, note: `compaction is due above ${percent(target)}`, kind: "dirtiness",
  });
