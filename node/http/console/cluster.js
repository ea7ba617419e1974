// The cluster: nodes, the metadata log, what the cleaner does here, topics, groups, transactions.
import { api } from "./ask.js";
import { bytes, count, crumbs, facts, hash, link, make, moment, percent, plural, quiet, table, tiles } from "./dom.js";

const ROWS = 200; // of topics at a time; the filter finds the others
let filter = "", internal = false;

function nodes(cluster, quorum) {
  const logs = new Map(quorum.members.map((member) => [member.node_id, member]));
  const brokers = new Map(cluster.brokers.map((broker) => [broker.node_id, broker]));
  const ids = [...new Set([...brokers.keys(), ...cluster.voters])].sort((a, b) => a - b);
  return table("Nodes of the cluster", ["Node", "Roles", "State", ["Leads", "number"], ["Replicas", "number"], ["Metadata log", "number"], "Rack", "Addresses"], ids.map((id) => {
    const broker = brokers.get(id), copy = logs.get(id);
    const roles = [broker && "broker", cluster.voters.includes(id) ? "voter" : "observer", id === cluster.controller_id && "controller"].filter(Boolean);
    const state = broker && broker.fenced ? ["fenced", "bad"] : broker ? ["serves", "good"] : ["controller only", ""];
    let log = "–";
    if (copy && copy.last_index !== null) log = copy.lag ? `${count(copy.last_index)}, ${count(copy.lag)} behind` : count(copy.last_index);
    return [id === cluster.node_id ? `${id}, this one` : id, roles.join(", "), state, broker ? count(broker.leads) : "–", broker ? count(broker.replicas) : "–", log, (broker && broker.rack) || "–", broker ? broker.endpoints.join(" ") : "–"];
  }));
}

const serving = (cluster) => cluster.brokers.filter((broker) => !broker.fenced).length;

function cleaners(told) {
  const name = (one) => link(hash("topic", one.topic, one.partition), `${one.topic} ${one.partition}`);
  const running = told.flatMap((one) => one.running.map((pass) => [one.node, pass]));
  const stuck = told.flatMap((one) => one.uncleanable.map((log) => [one.node, log]));
  return [make("h2", {}, "The cleaner"),
    running.length ? table("Passes that run", ["Log", ["Node", "number"], ["Done", "number"], ["Dirty ratio", "number"], "Why"], running.map(([node, pass]) =>
      [name(pass), node, percent(pass.progress), percent(pass.dirty_ratio), pass.reason])) : quiet("It rests: no pass runs."),
    stuck.length ? table("Logs that cannot be cleaned", ["Log that cannot be cleaned", ["Node", "number"], ["Failures", "number"], "Tried again", "Why"], stuck.slice(0, ROWS).map(([node, log]) =>
      [name(log), node, count(log.failures), moment(log.retry_at_ms), [log.reason, "bad"]])) : "",
    table("What the cleaner did since each node started", ["Node", ["Passes", "number"], ["Failed", "number"], ["Records removed", "number"], ["Bytes freed", "number"], ["Seconds", "number"]], told.map((one) =>
      [one.node, count(one.passes), one.failures ? [count(one.failures), "bad"] : "0", count(one.removed_records), bytes(one.cleaned_bytes), one.seconds.toFixed(1)]))];
}

export const overview = {
  pause: 3000,
  poll: 10000,
  async ask() {
    const [cluster, quorum] = await Promise.all([api("cluster"), api("quorum")]);
    const alive = cluster.brokers.filter((broker) => !broker.fenced).map((broker) => broker.node_id);
    const told = await Promise.all(alive.map((node) => api("cleaner", { node }).catch(() => null)));
    return [cluster, quorum, told.filter(Boolean)];
  },
  show([cluster, quorum, told]) {
    return [make("h1", {}, "Cluster"),
      cluster.ready ? "" : make("p", { class: "bad" }, `This node is not ready: ${cluster.reason}`),
      ...told.filter((one) => (one.uncompiled_kernels || []).length).map((one) =>
        make("p", { class: "bad" }, `Node ${one.node} runs kernels that are not compiled, and is far slower for it: ${one.uncompiled_kernels.join(", ")}`)),
      tiles([
        ["Nodes that serve", `${serving(cluster)} of ${cluster.brokers.length}`, serving(cluster) < cluster.brokers.length ? "bad" : ""],
        ["Controller", cluster.controller_id < 0 ? "none" : `node ${cluster.controller_id}`, cluster.controller_id < 0 ? "bad" : ""],
        ["Topics", count(cluster.topics)], ["Partitions", count(cluster.partitions)],
        ["Offline", count(cluster.offline_partitions), cluster.offline_partitions ? "bad" : ""],
        ["Under-replicated", count(cluster.under_replicated_partitions), cluster.under_replicated_partitions ? "bad" : ""]]),
      make("h2", {}, "Nodes"), nodes(cluster, quorum),
      quiet(`Metadata log: term ${count(quorum.term)}, led by ${quorum.leader_id < 0 ? "nobody" : "node " + quorum.leader_id}, committed to ${count(quorum.commit_index)}, applied here to ${count(cluster.metadata_index)}.`, quorum.reason ? ` The controller was not heard: ${quorum.reason}` : ""),
      cleaners(told),
      make("h2", {}, "Disks of this node"),
      table("Log directories", ["Log directory", ["Free", "number"], ["Size", "number"], "State"], cluster.log_directories.map((one) =>
        [one.path, bytes(one.usable_bytes), bytes(one.total_bytes), one.offline ? [one.offline, "bad"] : ["serves", "good"]]))];
  },
};

export const topics = {
  pause: 5000,
  poll: 10000,
  ask: async () => (await api("topics")).topics,
  show(list) {
    const place = make("div");
    const fill = () => {
      const found = list.filter((topic) => (internal || !topic.internal) && topic.name.includes(filter));
      const rows = found.slice(0, ROWS).map((topic) => {
        const trouble = [];
        if (topic.offline_partitions) trouble.push(`${topic.offline_partitions} offline`);
        if (topic.under_replicated_partitions) trouble.push(`${topic.under_replicated_partitions} under-replicated`);
        return [link(hash("topic", topic.name), topic.name), count(topic.partition_count), topic.replication_factor, bytes(topic.size_bytes), topic.cleanup_policy.join(", ") || "–", trouble.length ? [trouble.join(", "), "bad"] : ["in sync", "good"]];
      });
      const more = found.length - rows.length;
      place.replaceChildren(
        table("Topics", ["Topic", ["Partitions", "number"], ["Replicas", "number"], ["Size here", "number"], "Cleanup", "State"], rows),
        quiet(more > 0 ? `${count(more)} more: filter by name` : plural(found.length, "topic")));
    };
    const box = make("input", { type: "search", placeholder: "part of a name", id: "filter", autocomplete: "off" });
    box.value = filter;
    box.addEventListener("input", () => { filter = box.value; fill(); });
    const tick = make("input", { type: "checkbox", id: "internal" });
    tick.checked = internal;
    tick.addEventListener("change", () => { internal = tick.checked; fill(); });
    fill();
    return [make("h1", {}, "Topics"), make("form", {}, make("label", {}, "Filter by name", box), make("label", { class: "tick" }, tick, "internal topics too")), place];
  },
};

// Filters what the node lists: it leaves out what would be too long.
function filterForm(refresh) {
  const box = make("input", { type: "search", placeholder: "part of a name", id: "filter", autocomplete: "off" });
  box.value = filter;
  box.addEventListener("change", () => { filter = box.value; refresh(); });
  const form = make("form", {}, make("label", {}, "Filter by name", box), make("button", { class: "main" }, "Filter"));
  form.addEventListener("submit", (event) => { event.preventDefault(); filter = box.value; refresh(); });
  return form;
}

const listed = (found, rows, what) => quiet(found.left_out ? `${count(found.left_out)} more: filter by name` : plural(rows.length, what));

export const groups = {
  pause: 5000,
  poll: 10000,
  ask: () => api("groups", { name: filter }),
  show(found, refresh) {
    return [make("h1", {}, "Consumer groups"), filterForm(refresh),
      table("Consumer groups", ["Group", "State", ["Members", "number"], ["Lag", "number"], ["Coordinator", "number"], "Topics"], found.groups.map((group) =>
        [link(hash("group", group.group), group.group), group.state, count(group.members), count(group.lag), `node ${group.coordinator}`, group.topics.join(", ") || "–"])),
      listed(found, found.groups, "group"),
      unanswered(found.unanswered)];
  },
};

export const group = {
  pause: 3000,
  poll: 5000,
  ask: (name) => api("groups/" + encodeURIComponent(name)),
  show(found) {
    const members = new Map(found.members.map((member) => [member.member_id, member]));
    const total = found.partitions.reduce((sum, one) => sum + (one.lag || 0), 0);
    return [crumbs(link("#groups", "Groups")), make("h1", {}, found.group),
      facts([["State", found.state], ["Assignment", found.protocol || "–"], ["Coordinator", `node ${found.coordinator}`], ["Members", count(found.members.length)], ["Lag", count(total)]]),
      table("Partitions of the group", ["Partition", ["Committed", "number"], ["High watermark", "number"], ["Lag", "number"], "Member", "Client", "Host"], found.partitions.map((one) => {
        const member = members.get(one.member_id);
        return [link(hash("topic", one.topic, one.partition), `${one.topic} ${one.partition}`), count(one.committed_offset), count(one.high_watermark), one.lag ? [count(one.lag), "bad"] : count(one.lag), one.member_id || "–", member ? member.client_id : "–", member ? member.host : "–"];
      })),
      unanswered(found.unanswered)];
  },
};

export const transactions = {
  pause: 5000,
  poll: 10000,
  ask: () => api("transactions", { name: filter }),
  show(found, refresh) {
    return [make("h1", {}, "Transactions"), filterForm(refresh),
      table("Transactional ids", ["Transactional id", "State", ["Producer id", "number"], ["Coordinator", "number"]], found.transactions.map((one) =>
        [link(hash("transaction", one.transactional_id), one.transactional_id), one.state, String(one.producer_id), `node ${one.coordinator}`])),
      listed(found, found.transactions, "transactional id"),
      unanswered(found.unanswered)];
  },
};

export const transaction = {
  pause: 3000,
  poll: 5000,
  ask: (name) => api("transactions/" + encodeURIComponent(name)),
  show(found) {
    return [crumbs(link("#transactions", "Transactions")), make("h1", {}, found.transactional_id),
      facts([["State", found.state], ["Began", moment(found.started_ms)], ["Timeout", `${count(found.timeout_ms / 1000)} s`], ["Producer id", String(found.producer_id)], ["Producer epoch", String(found.producer_epoch)], ["Coordinator", `node ${found.coordinator}`]]),
      found.partitions.length ? table("Partitions of the transaction", ["Topic", ["Partition", "number"]], found.partitions.map((one) =>
        [link(hash("topic", one.topic, one.partition), one.topic), one.partition])) : quiet("No partition is in a transaction of it now.")];
  },
};

const unanswered = (list) => list.map((one) => make("p", { class: "bad" }, `Node ${one.node} does not answer: ${one.reason}`));
