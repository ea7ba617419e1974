"use strict";
// Everything is put into the document as text; no markup is made of strings anywhere.
const REFRESH_MS = 5000;
const ROWS = 200; // of topics at a time; the filter finds the others
const view = document.getElementById("view");
const trouble = document.getElementById("trouble");
let shown = "", filter = "", timer = 0, turn = 0;

function make(tag, given, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given || {})) {
    if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
function bytes(number) {
  let unit = 0;
  while (number >= 1024 && unit < UNITS.length - 1) { number /= 1024; unit += 1; }
  return `${unit ? number.toFixed(1) : number} ${UNITS[unit]}`;
}
const time = (ms) => ms === null || ms === undefined ? "never" : new Date(ms).toLocaleString();
const count = (number) => Number(number).toLocaleString();

async function api(path) {
  const answer = await fetch("/api/v1/" + path, { cache: "no-store" });
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error ? value.error.message : answer.statusText);
  return value;
}

function table(heads, rows) {
  const cell = (tag, [text, kind]) => make(tag, { class: kind, scope: tag === "th" ? "col" : null }, text);
  return make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, heads.map((head) => cell("th", head)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map((one) => cell("td", one)))))));
}

function brokers(cluster) {
  return table([["Node"], ["Part"], ["Rack"], ["State"], ["Addresses"]], cluster.brokers.map((broker) => {
    const parts = ["broker"];
    if (cluster.voters.includes(broker.node_id)) parts.push("voter");
    if (broker.node_id === cluster.controller_id) parts.push("active controller");
    return [[broker.node_id + (broker.node_id === cluster.node_id ? " (this one)" : "")], [parts.join(", ")],
      [broker.rack || "–"], [broker.fenced ? "fenced" : "serves", broker.fenced ? "bad" : ""], [broker.endpoints.join(" ")]];
  }));
}

function directories(cluster) {
  return table([["Log directory of this node"], ["Free", "number"], ["State"]], cluster.log_directories.map((one) =>
    [[one.path], [one.usable_bytes === null ? "–" : bytes(one.usable_bytes), "number"], [one.offline || "serves", one.offline ? "bad" : ""]]));
}

function topics(list) {
  const place = make("div");
  const fill = () => {
    const found = list.filter((topic) => topic.name.includes(filter));
    const rows = found.slice(0, ROWS).map((topic) => [
      [make("a", { href: "#topic/" + encodeURIComponent(topic.name) }, topic.name)],
      [topic.partition_count, "number"], [topic.replication_factor, "number"], [bytes(topic.size_bytes), "number"],
      [topic.cleanup_policy.join(", ") || "–"],
      [topic.offline_partitions ? `${topic.offline_partitions} offline` : "", "bad"]]);
    const more = found.length - rows.length;
    place.replaceChildren(
      table([["Topic"], ["Partitions", "number"], ["Replicas", "number"], ["Size here", "number"], ["Cleanup"], [""]], rows),
      make("p", { class: "quiet" }, more > 0 ? `${count(more)} more: filter by name` : `${count(found.length)} topic${found.length === 1 ? "" : "s"}`));
  };
  const box = make("input", { type: "search", "aria-label": "Filter topics by name", placeholder: "Filter by name", id: "filter" });
  box.value = filter;
  box.addEventListener("input", () => { filter = box.value; fill(); });
  fill();
  return [box, place];
}

function overview([cluster, all]) {
  return [make("h2", {}, "Nodes"), brokers(cluster),
    make("p", { class: cluster.ready ? "quiet" : "bad" }, cluster.ready ? `This node is ready. Raft term ${cluster.term}, metadata entry ${count(cluster.metadata_index)}.` : `This node is not ready: ${cluster.reason}`),
    directories(cluster), make("h2", {}, "Topics"), ...topics(all.topics)];
}

const KINDS = ["clean", "dirty", "active", "closed"];
function log(partition) {
  const numbers = {};
  const parts = partition.segments.map((segment) => {
    const known = KINDS.includes(segment.kind) ? segment.kind : "closed";
    numbers[known] = (numbers[known] || 0) + 1;
    const part = make("span", { class: known, title: `${segment.kind}: ${count(segment.base_offset)} to ${count(segment.next_offset)}, ${bytes(segment.size_bytes)}` });
    part.style.flexGrow = String(Math.max(segment.size_bytes, 1));
    return part;
  });
  const said = Object.entries(numbers).map(([kind, number]) => `${number} ${kind}`).join(", ");
  return make("div", { class: "log", role: "img", "aria-label": `segments: ${said}` }, parts);
}

function facts(pairs) {
  return make("dl", {}, pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function partition(one) {
  const head = make("h3", {}, `Partition ${one.partition}`);
  const basic = [["Leader", one.leader < 0 ? "none" : one.leader], ["In sync", `${one.isr.join(", ")} of ${one.replicas.join(", ")}`]];
  if (one.log_end_offset === undefined) {
    return make("article", {}, head, facts(basic), make("p", { class: one.offline ? "bad" : "quiet" }, one.offline || "This node has no replica: another node's page shows its log."));
  }
  basic.push(["Offsets", `${count(one.log_start_offset)} to ${count(one.log_end_offset)}`], ["High watermark", count(one.high_watermark)], ["Size", bytes(one.size_bytes)]);
  const status = one.compaction;
  if (status) {
    basic.push(["Compaction", status.state], ["Dirty ratio", status.dirty_ratio.toFixed(2)], ["Tombstones pending", count(status.tombstones_pending)],
      ["Generation", status.generation || "–"], ["Last compaction", time(status.last_compaction_ms)]);
    if (status.progress !== null) basic.push(["Progress", `${Math.round(status.progress * 100)} %`]);
  }
  const parts = [head, log(one)];
  if (one.segments_left_out) parts.push(make("p", { class: "quiet" }, `${count(one.segments_left_out)} older segments are not drawn`));
  parts.push(facts(basic));
  if (status) parts.push(make("p", { class: status.state === "uncleanable" ? "bad" : "quiet" }, status.reason));
  return make("article", {}, ...parts);
}

function topic([, found]) {
  const given = Object.entries(found.config).map(([name, value]) => [name, value]);
  return [make("p", {}, make("a", { href: "#" }, "All topics")), make("h2", {}, found.name),
    make("p", { class: "quiet" }, KINDS.flatMap((kind) => [make("span", { class: "key " + kind, "aria-hidden": "true" }), kind])),
    given.length ? facts(given) : "", ...found.partitions.map(partition)];
}

function wanted() {
  const [kind, name] = location.hash.slice(1).split("/", 2);
  if (kind === "topic" && name) return [["cluster", "topics/" + name], topic];
  return [["cluster", "topics"], overview];
}

async function refresh() {
  clearTimeout(timer);
  const mine = ++turn;
  try {
    const [paths, show] = wanted();
    const found = await Promise.all(paths.map(api));
    if (mine !== turn) return;
    trouble.hidden = true;
    const [cluster] = found;
    where.textContent = `cluster ${cluster.cluster_id}, as node ${cluster.node_id} sees it · kept ${cluster.version}`;
    const made = make("div", {}, ...show(found));
    if (made.outerHTML !== shown) { // read to compare, never written
      shown = made.outerHTML;
      const { id, hash } = document.activeElement;
      view.replaceChildren(made);
      const again = id ? document.getElementById(id) : hash && [...view.querySelectorAll("a")].find((one) => one.hash === hash);
      if (again) again.focus();
    }
  } catch (error) {
    if (mine !== turn) return;
    trouble.textContent = `This node does not answer as it should: ${error.message}`;
    trouble.hidden = false;
  }
  if (!document.hidden) timer = setTimeout(refresh, REFRESH_MS);
}

const where = document.getElementById("where");
addEventListener("hashchange", () => { refresh().then(() => view.focus()); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
refresh();
