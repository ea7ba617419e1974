// The cluster: nodes, the metadata log, what the log cleaner does, disks; and one node's settings.
import { actionForm, allowed, offNote, settingsOf } from "./actions.js";
import { api, recent } from "./api.js";
import { throughput } from "./charts.js";
import { kept } from "./command.js";
import {
  bytes, count, crumbs, hash, input, label, link, make, moment, percent, quiet, select, table, tick, tiles,
} from "./dom.js";
import { described } from "./settings.js";

const MOST_UNCLEANABLE = 200;
const SAMPLED_MS = 15000;

// Lists show no internal topics unless asked, so that a sum of all would be another number.
const own = (all, internal) =>
  internal ? `${count(all - internal)} and ${count(internal)} internal` : count(all);

function nodes(cluster, quorum) {
  const logs = new Map(quorum.members.map((member) => [member.node_id, member]));
  const brokers = new Map(cluster.brokers.map((broker) => [broker.node_id, broker]));
  const ids = [...new Set([...brokers.keys(), ...cluster.voters])].sort((a, b) => a - b);
  const rows = ids.map((id) => {
    const broker = brokers.get(id);
    const copy = logs.get(id);
    const roles = [
      broker && "broker",
      cluster.voters.includes(id) ? "voter" : "observer",
      id === cluster.controller_id && "controller",
    ].filter(Boolean);
    let state = ["controller only", ""];
    if (broker) state = broker.fenced ? ["fenced", "bad"] : ["active", "good"];
    let log = "–";
    if (copy && copy.last_index !== null) {
      log = copy.lag ? `${count(copy.last_index)}, lag ${count(copy.lag)}` : count(copy.last_index);
    }
    const name = id === cluster.node_id ? `${id}, this one` : String(id);
    return [
      broker ? link(hash("node", id), name) : name,
      roles.join(", "),
      state,
      broker ? own(broker.leads, broker.internal_leads) : "–",
      broker ? own(broker.replicas, broker.internal_replicas) : "–",
      log,
      (broker && broker.rack) || "–",
      broker ? broker.endpoints.join(" ") : "–",
    ];
  });
  return table("Nodes of the cluster", [
    "Node", "Roles", "State", ["Leaders", "number"], ["Replicas", "number"],
    ["Metadata log end", "number"], "Rack", "Listeners",
  ], rows);
}

function cleaners(known) {
  const name = (one) => link(hash("topic", one.topic, one.partition), `${one.topic}:${one.partition}`);
  const running = known.flatMap((one) => one.running.map((pass) =>
    [name(pass), one.node, percent(pass.progress), percent(pass.dirty_ratio), pass.reason]));
  const stuck = known.flatMap((one) => one.uncleanable.map((log) =>
    [name(log), one.node, count(log.failures), moment(log.retry_at_ms), [log.reason, "bad"]]));
  return [
    make("h2", {}, "Log cleaner"),
    running.length
      ? table("Running compactions", ["Partition", ["Node", "number"], ["Done", "number"], ["Dirty ratio", "number"], "Why"], running)
      : quiet("Idle: no compaction is running."),
    stuck.length
      ? table("Uncleanable partitions", ["Uncleanable partition", ["Node", "number"], ["Failures", "number"], "Tried again", "Why"], stuck.slice(0, MOST_UNCLEANABLE))
      : "",
    table("What the log cleaner did since each node started", [
      "Node", ["Compactions", "number"], ["Failed", "number"], ["Records removed", "number"],
      ["Bytes freed", "number"], ["Seconds", "number"],
    ], known.map((one) => [
      one.node, count(one.passes), one.failures ? [count(one.failures), "bad"] : "0",
      count(one.removed_records), bytes(one.cleaned_bytes), one.seconds.toFixed(1),
    ])),
  ];
}

const bad = (number) => number ? "bad" : "";

export const overview = {
  pause: 3000,
  poll: 10000,

  async load() {
    const [cluster, quorum, history] = await Promise.all([
      api("cluster"),
      api("quorum"),
      recent("history/throughput", {}, SAMPLED_MS).catch(() => null),
    ]);
    const active = cluster.brokers.filter((broker) => !broker.fenced).map((broker) => broker.node_id);
    const known = await Promise.all(active.map((id) => api("cleaner", { node: id }).catch(() => null)));
    return [cluster, quorum, known.filter(Boolean), history];
  },

  render([cluster, quorum, known, history]) {
    const active = cluster.brokers.filter((broker) => !broker.fenced).length;
    const leader = quorum.leader_id < 0 ? "no leader" : `leader node ${quorum.leader_id}`;
    return [
      make("h1", {}, "Cluster"),
      cluster.ready ? "" : make("p", { class: "bad" }, `This node is not ready: ${cluster.reason}`),
      known.filter((one) => (one.uncompiled_kernels || []).length).map((one) => make("p", { class: "bad" },
        `Node ${one.node} runs kernels that are not compiled, and is far slower for it: ${one.uncompiled_kernels.join(", ")}`)),
      tiles([
        ["Active brokers", `${active} of ${cluster.brokers.length}`, bad(active < cluster.brokers.length)],
        ["Controller", cluster.controller_id < 0 ? "none" : `node ${cluster.controller_id}`, bad(cluster.controller_id < 0)],
        ["Topics", own(cluster.topics, cluster.internal_topics)],
        ["Partitions", own(cluster.partitions, cluster.internal_partitions)],
        ["Offline", count(cluster.offline_partitions), bad(cluster.offline_partitions)],
        ["Under-replicated", count(cluster.under_replicated_partitions), bad(cluster.under_replicated_partitions)],
      ]),
      history ? [make("h2", {}, "Last hour"), throughput(history, "cluster")] : "",
      make("h2", {}, "Nodes"),
      nodes(cluster, quorum),
      quiet(`Metadata log: ${leader}, term ${count(quorum.term)}, committed to ${count(quorum.commit_index)}, ` +
        `applied here to ${count(cluster.metadata_index)}.`,
      quorum.reason ? ` The controller did not answer: ${quorum.reason}` : ""),
      cleaners(known),
      make("h2", {}, "Disks of this node"),
      table("Log directories", ["Log directory", ["Free", "number"], ["Size", "number"], "State"],
        cluster.log_directories.map((one) => [
          one.path, bytes(one.usable_bytes), bytes(one.total_bytes),
          one.offline ? [one.offline, "bad"] : ["online", "good"],
        ])),
    ];
  },
};

let defaults = false;

function settingsTable(list, part) {
  const rows = list
    .filter((one) => (defaults || one.source !== "default") && one.name.includes(part))
    .map((one) => [
      described(one),
      one.sensitive ? make("em", { class: "quiet" }, "hidden") : one.value ?? "–",
      one.source,
      one.read_only ? "restart" : "at once",
    ]);
  return rows.length
    ? table("Settings of the broker", ["Setting", ["Value", "breaks"], ["From", "short"], ["Changes", "short"]], rows)
    : quiet("No setting here.");
}

export const node = {
  still: true,
  load: async (id) => Promise.all([api(`brokers/${encodeURIComponent(id)}/config`), allowed()]),
  render([found, actions], page) {
    const box = input("filter", "", { type: "search", placeholder: "part of a name" });
    const place = make("div");
    const fill = () => place.replaceChildren(settingsTable(found.settings, box.value));
    box.addEventListener("input", fill);
    fill();
    const scope = select("scope", [[String(found.broker), `node ${found.broker}`], ["default", "all brokers"]], String(found.broker));
    const names = make("datalist", { id: "names" },
      found.settings.filter((one) => !one.read_only).map((one) => make("option", { value: one.name })));
    const name = input("name", "", { required: true, list: "names" });
    const what = select("what", [["set", "set to"], ["delete", "back to the default"]], "set");
    const value = input("value", "");
    return [
      crumbs(link("#", "Cluster")),
      make("h1", {}, `Node ${found.broker}`),
      make("h2", {}, "Settings"),
      make("div", { class: "row" }, label("Filter by name", box), tick("defaults", "also those at their default", defaults, (ticked) => {
        defaults = ticked;
        fill();
      })),
      place,
      offNote(actions),
      names,
      actionForm({
        id: "config",
        title: "Change a setting",
        note: "Those that change at once; the others need the broker's file and a restart.",
        fields: [label("Of", scope), label("Setting", name), label("Is", what), label("Value", value)],
        submit: "Change the setting",
        changed: () => { value.disabled = what.value === "delete"; },
        command: () => what.value === "set"
          ? kept(["broker", "config", "set"], scope.value, [["--config", `${name.value || "NAME"}=${value.value}`]])
          : kept(["broker", "config", "delete"], scope.value, [["--name", name.value || "NAME"]]),
        send: () => api("brokers/config", {}, {
          ...(scope.value === "default" ? {} : { broker: Number(scope.value) }),
          ...(what.value === "set" ? { set: settingsOf(`${name.value}=${value.value}`) } : { delete: [name.value] }),
        }),
        done: () => ["Changed. ", make("button", { type: "button", onclick: page.refresh }, "Load the settings again")],
      }, actions),
    ];
  },
};
