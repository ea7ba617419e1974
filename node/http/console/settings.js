// The settings of a topic, more partitions, and its deletion.
import { actionForm, allowed, offNote } from "./actions.js";
import { api } from "./api.js";
import { kept } from "./command.js";
import { input, label, link, make, plural, quiet, select, table } from "./dom.js";
import { topicHead } from "./topic.js";

// Those that people change; the node knows them all.
const USUAL = [
  "cleanup.policy", "compression.type", "delete.retention.ms", "file.delete.delay.ms",
  "kept.compaction.strategy", "max.compaction.lag.ms", "max.message.bytes", "message.timestamp.type",
  "min.cleanable.dirty.ratio", "min.compaction.lag.ms", "min.insync.replicas", "retention.bytes",
  "retention.ms", "segment.bytes", "segment.ms", "unclean.leader.election.enable",
];

export const settings = {
  kind: "topic",
  still: true,
  async load(name) {
    return Promise.all([api("topics/" + encodeURIComponent(name), { limit: 0 }), allowed()]);
  },
  render([found, actions], page) {
    const topic = found.name;
    const given = Object.entries(found.config);
    const name = input("name", "", { required: true, list: "names" });
    const what = select("what", [["set", "set to"], ["delete", "back to the default"]], "set");
    const value = input("value", "");
    const partitions = input("partitions", "", { type: "number", required: true, min: found.partition_count + 1 });
    const prefill = (setting, old) => {
      name.value = setting;
      value.value = old;
      what.value = "set";
      value.disabled = false;
      change.adapt();
      value.focus();
    };
    const change = actionForm({
      id: "alter",
      title: "Change a setting",
      fields: [label("Setting", name), label("Is", what), label("Value", value)],
      submit: "Change the setting",
      changed: () => { value.disabled = what.value === "delete"; },
      command: () => what.value === "set"
        ? kept(["topic", "alter"], topic, [["--config", `${name.value || "NAME"}=${value.value}`]])
        : kept(["topic", "alter"], topic, [["--delete-config", name.value || "NAME"]]),
      send: () => api("topics/alter", {}, what.value === "set"
        ? { topic, set: { [name.value]: value.value } }
        : { topic, delete: [name.value] }),
      done: () => ["Changed. ", make("button", { type: "button", onclick: page.refresh }, "Load the settings again")],
    }, actions);
    return [
      ...topicHead(topic, "settings"),
      offNote(actions),
      given.length
        ? table("Settings of the topic", ["Setting", ["Value", "breaks"], ""], given.map(([setting, set]) => [
          make("code", {}, setting), set,
          make("button", { type: "button", class: "plain", "aria-label": `change ${setting}`, onclick: () => prefill(setting, set) }, "change"),
        ]))
        : quiet("All its settings are at their defaults."),
      make("datalist", { id: "names" }, USUAL.map((usual) => make("option", { value: usual }))),
      change,
      actionForm({
        id: "grow",
        title: "Add partitions",
        note: `It has ${plural(found.partition_count, "partition")}. They cannot be taken away again, and keys go to other ` +
          "partitions from then on: their earlier records stay where they are.",
        fields: [label("Partitions in all", partitions)],
        submit: "Add partitions",
        typed: topic,
        command: () => kept(["topic", "alter"], topic, [["--partitions", partitions.value || "N"]]),
        send: () => api("topics/alter", {}, { topic, partitions: Number(partitions.value) }),
        done: () => [`It has ${partitions.value} partitions.`],
      }, actions),
      actionForm({
        id: "delete",
        title: "Delete the topic",
        note: "Its records are gone then, on all nodes.",
        fields: [],
        submit: "Delete topic",
        typed: topic,
        command: () => kept(["topic", "delete"], topic),
        send: () => api("topics/delete", {}, { topic }),
        done: () => ["Deleted. ", link("#topics", "All topics")],
      }, actions),
    ];
  },
};
