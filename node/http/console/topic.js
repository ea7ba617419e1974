// A topic with all its logs, and one of its partitions in full.
import { api } from "./ask.js";
import { bytes, count, crumbs, facts, hash, link, make, moment, percent, plural, quiet, table } from "./dom.js";
import { advance, kindsOf, legend, log, overTime } from "./log.js";

const DRAWN = 24; // segments of each log in the list
const SHOWN = 100; // partitions at a time
const SETTING = "kept.console.actions=true";
let shown = SHOWN;

const numbers = (status) => status ? percent(status.dirty_ratio) : "–";
const isr = (one) => {
  const missing = one.replicas.filter((id) => !one.isr.includes(id));
  return missing.length ? [`${one.isr.join(", ") || "none"} (without ${missing.join(", ")})`, "bad"] : one.isr.join(", ");
};
const longest = (one) => (one.followers || []).reduce((most, other) => Math.max(most, other.lag || 0), 0);

export const topic = {
  pause: 2000,
  poll: 5000,
  ask: (name) => api("topics/" + encodeURIComponent(name), { leaders: "true", segments: DRAWN, limit: shown }),
  show(found, refresh) {
    const list = found.partitions;
    const given = Object.entries(found.config);
    const rows = list.map((one) => {
      const status = one.compaction;
      const state = one.leader < 0 ? ["offline: nobody leads it", "bad"] : status ? [status.state, status.state === "uncleanable" ? "bad" : ""] : "–";
      return [link(hash("topic", found.name, one.partition), one.partition), one.leader < 0 ? "none" : one.leader, isr(one), [log(one), "log-cell"], one.high_watermark === undefined ? "–" : count(one.high_watermark - one.log_start_offset), bytes(one.size_bytes), count(longest(one)), numbers(status), state];
    });
    const more = found.partition_count - list.length;
    return [crumbs(link("#topics", "Topics")), make("h1", {}, found.name),
      given.length ? facts(given) : quiet("No settings of its own."),
      legend(kindsOf(list), list.some((one) => one.compaction && one.compaction.state === "running")),
      table("Partitions", ["Partition", ["Leader", "number"], "In sync", "Log", ["Offsets", "number"], ["Size", "number"], ["Lag", "number"], ["Dirty", "number"], "Compaction"], rows),
      more > 0 ? make("p", {}, make("button", { onclick: () => { shown += SHOWN; refresh(); } }, `${plural(more, "more partition")}: show`)) : "",
      found.partitions.filter((one) => one.unanswered).slice(0, 3).map((one) => make("p", { class: "bad" }, `Partition ${one.partition}: its leader does not answer (${one.unanswered}); what this node has is shown.`))];
  },
};

function replicas(one) {
  const status = one.compaction, others = new Map((one.followers || []).map((other) => [other.node, other]));
  const generations = new Map(((status && status.replicas) || []).map((other) => [other.replica, other]));
  return table("Replicas", ["Replica", "Part", ["Log end", "number"], ["Lag", "number"], ["Generation applied", "number"], ["Generation held", "number"], "State"], one.replicas.map((id) => {
    const leads = id === one.leader, other = others.get(id), known = generations.get(id);
    const part = leads ? "leader" : one.isr.includes(id) ? "in sync" : ["not in sync", "bad"];
    const applied = leads ? status && status.generation : known && known.applied, held = leads ? status && status.held : known && known.held;
    return [`node ${id}`, part, leads ? count(one.log_end_offset) : count(other && other.log_end_offset), leads ? "" : count(other && other.lag), applied || "–", held || "–", known && known.behind && status.published ? ["behind", "bad"] : ""];
  }));
}

const reasons = (removed) => Object.entries(removed).map(([why, number]) => `${count(number)} ${why}`).join(", ") || "nothing";

function next(status) {
  const words = { idle: "Nothing to clean", waiting: "Not now", due: "Next", running: "Running", uncleanable: "It fails" };
  const parts = [make("strong", {}, `${words[status.state] || status.state}: `), status.reason];
  if (status.state === "running" && status.progress !== null) parts.push(make("span", { class: "done" }, ` (${percent(status.progress)})`));
  if (status.retry_at_ms) parts.push("; it is tried again at ", moment(status.retry_at_ms));
  if (status.awaits.length) parts.push(`; waits for node ${status.awaits.join(", ")} to hold the manifest`);
  return make("p", { class: "why " + status.state }, parts);
}

function compaction(one, passes, samples, target) {
  const status = one.compaction, last = passes.last;
  const known = passes.passes.map((pass) => [pass.generation, moment(pass.at_ms), reasons(pass.removed)]);
  return [make("h2", {}, "Compaction"),
    facts([["Dirty ratio", `${percent(status.dirty_ratio)} of ${bytes(status.clean_bytes + status.dirty_bytes)}`], ["Cleanable", status.cleanable_end_offset > status.first_dirty_offset ? `${count(status.first_dirty_offset)} to ${count(status.cleanable_end_offset)}` : "nothing"], ["Held back by", status.bound || "–"],
      ["Tombstones pending", count(status.tombstones_pending)], ["The first may go", status.next_horizon_ms ? moment(status.next_horizon_ms) : "–"], ["Last compaction", moment(status.last_compaction_ms)], ["Generation published", status.published || status.generation || "–"]]),
    last ? quiet(`The last pass removed ${plural(last.records_removed, "record")} of ${count(last.records_examined)}: ${bytes(last.bytes_before)} became ${bytes(last.bytes_after)}.`) : "",
    make("div", { class: "two" },
      make("section", {}, make("h3", {}, "Dirty ratio over time"), overTime([...samples, { at_ms: Math.max(Date.now(), samples.length ? samples[samples.length - 1].at_ms : 0), dirty_ratio: status.dirty_ratio }], target)),
      make("section", {}, make("h3", {}, "What passes removed"), known.length ? table("Passes in the removal journal, newest first", [["Generation", ""], "When", "Removed"], known) : quiet("The removal journal is empty: no pass has removed anything here.")))];
}

function buttons(one, cluster, act) {
  const off = !cluster.actions;
  const button = (text, id, action, why) => make("button", { id, disabled: Boolean(off || why), "aria-describedby": "about-buttons", onclick: action }, text);
  const body = (name) => ({ topic: name, partition: one.partition });
  const preferred = one.replicas[0];
  return (name) => [make("div", { class: "row" },
    make("a", { class: "button", href: hash("records", name, one.partition) }, "Look at the records"),
    one.compaction ? button("Compact now", "compact", () => act("compaction/now", body(name), "A pass is on its way."), one.leader < 0) : "",
    button(`Let node ${preferred} lead`, "elect", () => act("partitions/elect", body(name), `Node ${preferred} leads.`), one.leader === preferred)),
  make("p", { class: "quiet small", id: "about-buttons" }, off ? ["Buttons are off. The setting ", make("code", {}, SETTING), " turns them on."] : one.leader === preferred ? "The preferred replica leads already." : "The preferred replica is the first one.")];
}

export const partition = {
  pause: 1000,
  query: (name, number) => ({ topic: name, partition: number }),
  async ask(name, number) {
    const [cluster, found] = await Promise.all([api("cluster"), api("topics/" + encodeURIComponent(name), { leaders: "true", partition: number })]);
    const one = found.partitions[0], where = { topic: name, partition: number, node: one.leader < 0 ? null : one.leader };
    if (!one.compaction || one.unanswered) return [cluster, found, { passes: [], last: null }, []];
    const none = { passes: [], last: null, samples: [] };
    const [passes, history] = await Promise.all([api("compaction/passes", where).catch(() => none), api("compaction/history", where).catch(() => none)]);
    return [cluster, found, passes, history.samples];
  },
  show([cluster, found, passes, samples], refresh, act) {
    const one = found.partitions[0], status = one.compaction;
    const head = [crumbs(link("#topics", "Topics"), link(hash("topic", found.name), found.name)), make("h1", {}, `${found.name}, partition ${one.partition}`)];
    if (one.unanswered) head.push(make("p", { class: "bad" }, `Its leader does not answer (${one.unanswered}); what this node has is shown.`));
    if (one.log_end_offset === undefined) return [...head, facts([["Leader", one.leader < 0 ? "none" : one.leader], ["In sync", isr(one)]]), make("p", { class: "bad" }, one.offline || "No node that answers has a replica.")];
    const target = Number(found.config["min.cleanable.dirty.ratio"] || found.broker_defaults["min.cleanable.dirty.ratio"] || 0.5);
    return [...head, log(one, true),
      make("p", { class: "scale" }, make("span", {}, `offset ${count(one.log_start_offset)}`), make("span", {}, `${plural(one.segments.length + one.segments_left_out, "segment")}, ${bytes(one.size_bytes)}`), make("span", {}, count(one.log_end_offset))),
      one.segments_left_out ? quiet(`${count(one.segments_left_out)} older segments are not drawn.`) : "",
      legend(kindsOf([one]), status && status.state === "running"),
      status ? next(status) : quiet("This topic is not compacted: its cleanup.policy has no compact."),
      buttons(one, cluster, act)(found.name),
      facts([["Leader", one.leader < 0 ? "none" : `node ${one.leader}, epoch ${one.leader_epoch}`], ["Offsets", `${count(one.log_start_offset)} to ${count(one.log_end_offset)}`], ["High watermark", count(one.high_watermark)], ["Last stable offset", count(one.last_stable_offset)], ["Size", bytes(one.size_bytes)], ["Segments", count(one.segments.length + one.segments_left_out)]]),
      make("h2", {}, "Replicas"), replicas(one),
      status ? compaction(one, passes, samples, target) : ""];
  },
  moved(event) {
    const row = document.querySelector(".log.big"), done = document.querySelector(".done"), told = event.partition;
    if (!row || !done || !told || told.state !== "running" || told.progress === null) return;
    advance(row, told.progress);
    done.textContent = ` (${percent(told.progress)})`;
  },
};
