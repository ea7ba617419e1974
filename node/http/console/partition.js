// A partition in full: its log, what its compaction does, and its replicas.
import { allowed, offNote } from "./actions.js";
import { api } from "./api.js";
import { nowAfter } from "./charts.js";
import {
  button, bytes, count, crumbs, facts, hash, link, make, moment, percent, plural, quiet, table,
} from "./dom.js";
import { advance, dirtyRatio, kindsOf, legend, log } from "./log.js";
import { isr } from "./topic.js";

function replicas(one) {
  const status = one.compaction;
  const others = new Map((one.followers || []).map((other) => [other.node, other]));
  const generations = new Map(((status && status.replicas) || []).map((other) => [other.replica, other]));
  const rows = one.replicas.map((id) => {
    const leads = id === one.leader;
    const other = others.get(id);
    const known = generations.get(id);
    const follows = one.isr.includes(id) ? "follower, in sync" : ["follower, not in sync", "bad"];
    const own = leads ? status && { applied: status.generation, held: status.held } : known;
    return [
      `node ${id}${id === one.replicas[0] ? " (preferred)" : ""}`,
      leads ? "leader" : follows,
      leads ? count(one.log_end_offset) : count(other && other.log_end_offset),
      leads ? "" : count(other && other.lag),
      (own && own.applied) || "–",
      (own && own.held) || "–",
      known && known.behind && status.published ? ["behind", "bad"] : "",
    ];
  });
  return table("Replicas", [
    "Replica", "Role", ["Log end offset", "number"], ["Lag", "number"],
    ["Generation applied", "number"], ["Generation held", "number"], "State",
  ], rows);
}

const reasons = (removed) =>
  Object.entries(removed).map(([why, number]) => `${count(number)} ${why}`).join(", ") || "nothing";

const WORDS = {
  idle: "Nothing to compact: ",
  waiting: "Not due: ",
  due: "Compaction due: ",
  running: "Compaction running: ",
  uncleanable: "Compaction failed: ",
};

// What is due, in a sentence.
function next(status) {
  const runs = status.state === "running" && status.progress !== null;
  const parts = [
    make("strong", {}, WORDS[status.state] || `${status.state}: `),
    runs ? make("span", { class: "done" }, percent(status.progress)) : status.reason,
  ];
  if (status.retry_at_ms) parts.push("; tried again at ", moment(status.retry_at_ms));
  if (status.awaits.length) {
    parts.push(`; waits for node ${status.awaits.join(", ")} to hold the manifest`);
  }
  return make("p", { class: "why " + status.state }, parts);
}

function compaction(one, passes, samples, target) {
  const status = one.compaction;
  const last = passes.last;
  const known = passes.passes.map((pass) => [pass.generation, moment(pass.at_ms), reasons(pass.removed)]);
  const now = { at_ms: nowAfter(samples), dirty_ratio: status.dirty_ratio };
  const cleanable = status.cleanable_end_offset > status.first_dirty_offset;
  return [
    make("h2", {}, "Compaction"),
    facts([
      ["Dirty ratio", `${percent(status.dirty_ratio)} of ${bytes(status.clean_bytes + status.dirty_bytes)}`],
      ["Cleanable offsets", cleanable
        ? `${count(status.first_dirty_offset)} to ${count(status.cleanable_end_offset)}` : "none"],
      ["Bounded by", status.bound || "–"],
      ["Tombstones pending", count(status.tombstones_pending)],
      ["Next delete horizon", status.next_horizon_ms ? moment(status.next_horizon_ms) : "–"],
      ["Last compaction", moment(status.last_compaction_ms)],
      ["Generation published", status.published || status.generation || "–"],
    ]),
    last ? quiet(`The last compaction removed ${plural(last.records_removed, "record")} of ` +
      `${count(last.records_examined)}: ${bytes(last.bytes_before)} became ${bytes(last.bytes_after)}.`) : "",
    make("div", { class: "two" },
      make("section", {}, dirtyRatio([...samples, now], target)),
      make("section", {}, make("h3", {}, "Removed records"), known.length
        ? table("Compactions in the removal journal, the newest first", ["Generation", "When", "Removed"], known)
        : quiet("The removal journal is empty: no compaction has removed anything here."))),
  ];
}

function buttons(name, one, actions, page) {
  const body = { topic: name, partition: one.partition };
  const preferred = one.replicas[0];
  const leads = one.leader === preferred;
  const act = (text, id, why, action) => make("button", {
    id,
    disabled: !actions || why,
    "aria-describedby": actions ? null : "about-buttons",
    onclick: action,
  }, text);
  return [
    make("div", { class: "row" },
      button(hash("records", name, one.partition), "Records"),
      one.compaction ? act("Compact now", "compact", one.leader < 0,
        () => page.act("compaction/now", body, "Compaction started.")) : "",
      act("Elect preferred leader", "elect", leads,
        () => page.act("partitions/elect", body, `Node ${preferred} is the leader.`))),
    offNote(actions),
    actions && leads ? quiet(`The preferred replica, node ${preferred}, is the leader.`) : "",
  ];
}

export const partition = {
  kind: "topic",
  pause: 1000,
  query: (name, number) => ({ topic: name, partition: number }),

  async load(name, number) {
    const [actions, found] = await Promise.all([
      allowed(),
      api("topics/" + encodeURIComponent(name), { leaders: "true", partition: number }),
    ]);
    const one = found.partitions[0];
    const none = { passes: [], last: null, samples: [] };
    if (!one.compaction || one.unanswered) return [actions, found, none, none];
    const at = { topic: name, partition: number, node: one.leader < 0 ? null : one.leader };
    const [passes, history] = await Promise.all([
      api("compaction/passes", at).catch(() => none),
      api("compaction/history", at).catch(() => none),
    ]);
    return [actions, found, passes, history];
  },

  render([actions, found, passes, history], page) {
    const one = found.partitions[0];
    const status = one.compaction;
    const head = [
      crumbs(link("#topics", "Topics"), link(hash("topic", found.name), found.name)),
      make("h1", {}, `${found.name}, partition ${one.partition}`),
    ];
    if (one.unanswered) {
      head.push(make("p", { class: "bad" },
        `Its leader does not answer (${one.unanswered}); what this node has is shown.`));
    }
    if (one.log_end_offset === undefined) {
      return [
        ...head,
        facts([["Leader", one.leader < 0 ? "none" : one.leader], ["ISR", ...[isr(one)].flat()]]),
        make("p", { class: "bad" }, one.offline || "No node that answers has a replica."),
      ];
    }
    const name = "min.cleanable.dirty.ratio";
    const target = Number((found.config || {})[name] || (found.broker_defaults || {})[name] || 0.5);
    const segments = one.segments.length + one.segments_left_out;
    return [
      ...head,
      log(one, true),
      make("p", { class: "scale" },
        make("span", {}, `offset ${count(one.log_start_offset)}`),
        make("span", {}, `${plural(segments, "segment")}, ${bytes(one.size_bytes)}`),
        make("span", {}, count(one.log_end_offset))),
      one.segments_left_out ? quiet(`${count(one.segments_left_out)} older segments are not drawn.`) : "",
      legend(kindsOf([one]), status && status.state === "running"),
      status ? next(status) : quiet("This topic is not compacted: its cleanup.policy has no compact."),
      buttons(found.name, one, actions, page),
      facts([
        ["Leader", one.leader < 0 ? "none" : `node ${one.leader}, epoch ${one.leader_epoch}`],
        ["Offsets", `${count(one.log_start_offset)} to ${count(one.log_end_offset)}`],
        ["High watermark", count(one.high_watermark)],
        ["Last stable offset", count(one.last_stable_offset)],
        ["Size", bytes(one.size_bytes)],
        ["Segments", count(segments)],
      ]),
      make("h2", {}, "Replicas"),
      replicas(one),
      status ? compaction(one, passes, history.samples, target) : "",
    ];
  },

  moved(event) {
    const row = document.querySelector(".log.big");
    const done = document.querySelector(".done");
    const pulse = event.partition;
    if (!row || !done || !pulse || pulse.state !== "running" || pulse.progress === null) return;
    advance(row, pulse.progress);
    done.textContent = percent(pulse.progress);
  },
};
