// Values over time: small drawings, each with a text that says the same and a table of its values.
import { bytes, count, drawn, make, plural, quiet, table, timeOf } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 100;
const ROWS = 60;
const INTERVAL_MS = 15000;
const GAP = 2.5; // intervals: where more than that is missing, the line is broken

// When a value is from that was loaded now: a browser's clock may be behind those of the nodes.
export const nowAfter = (samples) =>
  Math.max(Date.now(), samples.length ? samples[samples.length - 1].at_ms : 0);

const rate = (show) => (value) => `${show(value)}/s`;
const short = (value) =>
  value === null || value === undefined ? "–" : count(value < 10 ? Math.round(value * 10) / 10 : Math.round(value));
export const perSecond = { bytes: rate(bytes), records: rate(short) };

// A number that people would end an axis with, at least `value`.
function roundedUp(value, binary) {
  if (value <= 0) return 1;
  let unit = 1;
  if (binary) while (value >= 1024 * unit) unit *= 1024;
  const power = 10 ** Math.floor(Math.log10(value / unit));
  const step = [1, 2, 5, 10].find((factor) => factor * power * unit >= value);
  return step * power * unit;
}

// Runs of samples without a hole between them.
function runs(known, interval) {
  const found = [];
  let before = null;
  for (const sample of known) {
    if (!before || sample.at_ms - before.at_ms > GAP * interval) found.push([]);
    found[found.length - 1].push(sample);
    before = sample;
  }
  return found;
}

// One line over time. `samples` have `at_ms` and the value, by `name`; `show` makes text of one.
// `top` is the end of the axis, where it is no matter of the values; `steps`: a value holds until
// the next one; `target` is drawn dashed.
export function chart(id, title, samples, name, options) {
  const { show = count, interval = INTERVAL_MS, top = null, steps = false } = options;
  const { target = null, note = "", kind = "" } = options;
  const known = samples.filter((sample) => sample[name] !== null && sample[name] !== undefined);
  const heading = make("h3", {}, title);
  if (known.length < 2) {
    return make("figure", { class: "chart" }, make("figcaption", {}, heading),
      make("p", { class: "quiet small" }, `Sampled every ${plural(interval / 1000, "second")}: drawn once there are two samples.`));
  }
  const values = known.map((sample) => sample[name]);
  const now = values[values.length - 1];
  const most = Math.max(...values);
  const end = top ?? roundedUp(most, show === bytes || show === perSecond.bytes);
  const first = known[0].at_ms;
  const last = known[known.length - 1].at_ms;
  const x = (sample) => (WIDTH * (sample.at_ms - first) / Math.max(last - first, 1)).toFixed(1);
  const y = (value) => (HEIGHT - 2 - (HEIGHT - 4) * Math.min(value / end, 1)).toFixed(1);
  const lines = runs(known, interval).map((run) => {
    const points = run.flatMap((sample, i) => {
      const at = `${x(sample)},${y(sample[name])}`;
      return steps && i ? [`${x(sample)},${y(run[i - 1][name])}`, at] : [at];
    });
    const ends = [x(run[run.length - 1]), x(run[0])].map((end) => `${end},${y(0)}`);
    return [
      drawn("polygon", { class: "area", points: [...points, ...ends].join(" ") }),
      drawn("polyline", { class: "value", points: points.join(" ") }),
    ];
  });
  const level = (kind, value) => drawn("line", { class: kind, x1: 0, x2: WIDTH, y1: y(value), y2: y(value) });
  const minutes = Math.max(1, Math.round((last - first) / 60000));
  const text = `${title} over the last ${plural(minutes, "minute")}: now ${show(now)}, at most ${show(most)}, ` +
    `at least ${show(Math.min(...values))}${note ? "; " + note : ""}`;
  return make("figure", { class: `chart ${kind}` },
    make("figcaption", {}, heading, make("strong", {}, show(now))),
    make("div", { class: "plot" },
      make("span", { class: "top", "aria-hidden": "true" }, show(end).replace(".0 ", " ")),
      drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": text },
        level("base", end), level("base", 0), lines, target === null ? null : level("target", target))),
    make("p", { class: "scale" }, make("span", {}, `${plural(minutes, "minute")} ago`), note ? make("span", {}, note) : "", make("span", {}, "now")),
    valuesTable(id, title, known, name, show));
}

// The values, at most one a minute: made when it is unfolded.
function valuesTable(id, title, known, name, show) {
  const details = make("details", { id, class: "small" }, make("summary", {}, `${title} as a table`));
  details.addEventListener("toggle", () => {
    if (!details.open || details.childElementCount > 1) return;
    const step = Math.ceil(known.length / ROWS);
    const rows = known.filter((sample, i) => (known.length - 1 - i) % step === 0).reverse()
      .map((sample) => [timeOf(new Date(sample.at_ms)), show(sample[name])]);
    details.append(table(`${title}, the newest first`, ["Time", ["Value", "number"]], rows));
  });
  return details;
}

// What a topic or the cluster takes in and gives out.
export function throughput(found, prefix) {
  if (!found) return "";
  const { samples, interval_ms: interval } = found;
  if (!samples.length && found.topic !== null) return quiet("Nothing was written or read within the last hour.");
  const line = (name, title, show) => chart(`${prefix}-${name}`, title, samples, name, { show, interval });
  return make("div", { class: "charts" },
    line("bytes_in_per_second", "Bytes in", perSecond.bytes),
    line("bytes_out_per_second", "Bytes out", perSecond.bytes),
    line("records_in_per_second", "Records in", perSecond.records),
    line("size_bytes", "Size of logs", bytes));
}
