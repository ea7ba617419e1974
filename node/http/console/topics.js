// The list of topics, and a form that creates one.
import { actionForm, allowed, offNote, settingsOf } from "./actions.js";
import { api } from "./api.js";
import { first, kept } from "./command.js";
import {
  button, bytes, count, crumbs, form, hash, input, label, link, make, plural, quiet, table, tick,
} from "./dom.js";

const ROWS = 200; // at a time; the filter finds the others
let filter = "";
let internal = false;

function row(topic) {
  const trouble = [];
  if (topic.offline_partitions) trouble.push(`${topic.offline_partitions} offline`);
  if (topic.under_replicated_partitions) {
    trouble.push(`${topic.under_replicated_partitions} under-replicated`);
  }
  return [
    link(hash("topic", topic.name), topic.name),
    count(topic.partition_count),
    topic.replication_factor,
    bytes(topic.size_bytes),
    topic.cleanup_policy.join(", ") || "–",
    trouble.length ? [trouble.join(", "), "bad"] : ["in sync", "good short"],
    [link(hash("records", topic.name), "records"), "short"],
  ];
}

export const topics = {
  pause: 5000,
  poll: 10000,
  load: async () => (await api("topics")).topics,
  render(list) {
    const own = list.filter((topic) => !topic.internal);
    const place = make("div");
    const fill = () => {
      const found = list.filter((topic) => (internal || !topic.internal) && topic.name.includes(filter));
      const rows = found.slice(0, ROWS).map(row);
      const more = found.length - rows.length;
      place.replaceChildren(
        table("Topics", ["Topic", ["Partitions", "number"], ["Replication factor", "number"],
          ["Size here", "number"], "cleanup.policy", "State", ""], rows),
        quiet(more > 0 ? `${count(more)} more: filter by name` : plural(found.length, "topic")));
    };
    const box = input("filter", filter, { type: "search", placeholder: "part of a name" });
    box.addEventListener("input", () => {
      filter = box.value;
      fill();
    });
    fill();
    return [
      make("h1", {}, "Topics"),
      form("Filter", [
        label("Filter by name", box),
        tick("internal", "internal topics too", internal, (ticked) => {
          internal = ticked;
          fill();
        }),
        button("#create", "Create topic"),
      ], () => {}),
      own.length ? "" : first("There is no topic yet. This creates the first one:",
        kept(["topic", "create"], "orders", [["--partitions", 3]])),
      own.length || internal ? place : "",
    ];
  },
};

export const create = {
  still: true,
  load: allowed,
  render(actions) {
    const name = input("name", "", { required: true, maxlength: 249, pattern: "[a-zA-Z0-9._\\-]+" });
    const partitions = input("partitions", "", { type: "number", min: 1, placeholder: "num.partitions" });
    const replicas = input("replicas", "", { type: "number", min: 1, placeholder: "default.replication.factor" });
    const config = make("textarea", {
      id: "config", rows: 3, spellcheck: "false", placeholder: "cleanup.policy=compact",
      "aria-describedby": "about-config",
    });
    return [
      crumbs(link("#topics", "Topics")),
      make("h1", {}, "Create topic"),
      offNote(actions),
      actionForm({
        id: "create",
        title: "",
        fields: [
          label("Name", name),
          label("Partitions", partitions),
          label("Replication factor", replicas),
          label("Settings, name=value in each line", config),
        ],
        submit: "Create topic",
        command: () => kept(["topic", "create"], name.value || "NAME", [
          ["--partitions", partitions.value],
          ["--replication-factor", replicas.value],
          ...Object.entries(settingsOf(config.value)).map(([key, value]) => ["--config", `${key}=${value}`]),
        ]),
        send: () => api("topics/create", {}, {
          topic: name.value,
          ...(partitions.value ? { partitions: Number(partitions.value) } : {}),
          ...(replicas.value ? { replication_factor: Number(replicas.value) } : {}),
          config: settingsOf(config.value),
        }),
        done: () => ["Created ", link(hash("topic", name.value), name.value), "."],
      }, actions),
    ];
  },
};
