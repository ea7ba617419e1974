// A topic: what goes through it, who reads it, and all its logs.
import { api, recent } from "./api.js";
import { perSecond, throughput } from "./charts.js";
import { first, kept } from "./command.js";
import {
  bytes, count, crumbs, facts, hash, link, make, percent, plural, quiet, table, tiles,
} from "./dom.js";
import { lagOf, unanswered } from "./groups.js";
import { kindsOf, legend, log } from "./log.js";

const DRAWN = 24; // segments of each log in the list
const SHOWN = 100; // partitions at a time
const SAMPLED_MS = 15000;
const GROUPS_MS = 10000;
let shown = SHOWN;

const TABS = [["topic", "Overview"], ["records", "Records"], ["produce", "Produce"], ["settings", "Settings"]];

// The head of each page about a topic.
export const topicHead = (name, tab) => [
  crumbs(link("#topics", "Topics")),
  make("h1", {}, name),
  make("nav", { class: "tabs", "aria-label": "Topic" }, TABS.map(([view, text]) =>
    make("a", { href: hash(view, name), "aria-current": view === tab ? "page" : null }, text))),
];

export const isr = (one) => {
  const missing = one.replicas.filter((id) => !one.isr.includes(id));
  return missing.length
    ? [`${one.isr.join(", ") || "none"} (without ${missing.join(", ")})`, "bad"]
    : [one.isr.join(", "), "short"];
};

const longest = (one) =>
  (one.followers || []).reduce((most, other) => Math.max(most, other.lag || 0), 0);

function partitionRow(name, one) {
  const status = one.compaction;
  let state = "–";
  if (one.leader < 0) state = ["offline: no leader", "bad"];
  else if (status) state = [status.state, status.state === "uncleanable" ? "bad" : ""];
  const known = one.high_watermark !== undefined;
  return [
    link(hash("topic", name, one.partition), one.partition),
    one.leader < 0 ? "none" : one.leader,
    isr(one),
    [log(one), "log-cell"],
    known ? count(one.log_start_offset) : "–",
    known ? count(one.high_watermark) : "–",
    bytes(one.size_bytes),
    count(longest(one)),
    status ? percent(status.dirty_ratio) : "–",
    state,
  ];
}

function consumers(found, name) {
  if (!found) return "";
  const rows = found.groups.map((group) => [
    link(hash("group", group.group), group.group),
    group.state,
    count(group.members),
    lagOf(group),
    `node ${group.coordinator}`,
  ]);
  return [
    make("h2", {}, "Consumer groups"),
    rows.length
      ? table("Consumer groups of the topic", ["Group", "State", ["Members", "number"], ["Lag", "number"], "Coordinator"], rows)
      : first("No group reads this topic. This reads it as one:", kept(["consume"], name, [["--group", "readers"]])),
    found.left_out ? quiet(`${plural(found.left_out, "more group")} of the cluster not looked at.`) : "",
    unanswered(found.unanswered),
  ];
}

// Where nothing was ever written: how to begin.
function empty(found) {
  const list = found.partitions;
  if (list.length < found.partition_count || !list.every((one) => one.high_watermark === 0)) return "";
  return first("The topic has no records. This appends one:",
    `echo 'alice:hello' | ${kept(["produce"], found.name, [["--key-separator", ":"]])}`);
}

export const topic = {
  kind: "topic",
  pause: 2000,
  poll: 5000,
  async load(name) {
    const path = "topics/" + encodeURIComponent(name);
    const [found, history, groups] = await Promise.all([
      api(path, { leaders: "true", segments: DRAWN, limit: shown }),
      recent("history/throughput", { topic: name }, SAMPLED_MS).catch(() => null),
      recent(path + "/groups", {}, GROUPS_MS).catch(() => null),
    ]);
    return [found, history, groups];
  },
  render([found, history, groups], page) {
    const list = found.partitions;
    const settings = Object.entries(found.config || {});
    const samples = history ? history.samples : [];
    const now = samples[samples.length - 1];
    const more = found.partition_count - list.length;
    return [
      ...topicHead(found.name, "topic"),
      tiles([
        ["Partitions", count(found.partition_count)],
        ["Replication factor", count(found.replication_factor)],
        now ? ["Bytes in", perSecond.bytes(now.bytes_in_per_second)] : null,
        now ? ["Bytes out", perSecond.bytes(now.bytes_out_per_second)] : null,
        now ? ["Size of logs", bytes(now.size_bytes)] : null,
        ["Offline", count(found.offline_partitions), found.offline_partitions ? "bad" : ""],
        ["Under-replicated", count(found.under_replicated_partitions), found.under_replicated_partitions ? "bad" : ""],
      ]),
      settings.length ? facts(settings) : "",
      found.config
        ? quiet(settings.length ? "The other settings are" : "All its settings are", " at ",
          link(hash("settings", found.name), "their defaults"), ".")
        : quiet("You may not see its settings (DescribeConfigs)."),
      history ? [make("h2", {}, "Last hour"), throughput(history, "topic")] : "",
      empty(found),
      consumers(groups, found.name),
      make("h2", {}, "Partitions"),
      legend(kindsOf(list), list.some((one) => one.compaction && one.compaction.state === "running")),
      table("Partitions", [
        "Partition", ["Leader", "number"], "ISR", "Log", ["Log start", "number"], ["High watermark", "number"],
        ["Size", "number"], ["Replica lag", "number"], ["Dirty", "number"], "Compaction",
      ], list.map((one) => partitionRow(found.name, one))),
      more > 0 ? make("p", {}, make("button", {
        id: "more",
        onclick: () => {
          shown += SHOWN;
          page.refresh();
        },
      }, `Show more: ${plural(more, "partition")} left`)) : "",
      list.filter((one) => one.unanswered).slice(0, 3).map((one) => make("p", { class: "bad" },
        `Partition ${one.partition}: its leader does not answer (${one.unanswered}); what this node has is shown.`)),
    ];
  },
};
