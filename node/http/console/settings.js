// The settings of a topic, more partitions, and its deletion. Also the table of settings that a
// broker's page shows.
import { actionForm, allowed, offNote } from "./actions.js";
import { api } from "./api.js";
import { kept } from "./command.js";
import { input, label, link, make, plural, quiet, select, table } from "./dom.js";
import { topicHead } from "./topic.js";

// A setting and below it what it means.
export const described = (setting) => make("div", {},
  make("code", {}, setting.name),
  setting.documentation ? make("p", { class: "meaning" }, setting.documentation) : "");

const shown = (value) => {
  if (value === null || value === undefined) return make("em", { class: "quiet" }, "unset");
  return value === "" ? make("em", { class: "quiet" }, "empty") : value;
};

// What may be given: "int, 1 to 10000, default 1".
const range = (setting) => [
  setting.type,
  setting.allowed,
  setting.default === null ? "unset by default" : `default ${setting.default || "empty"}`,
].filter(Boolean).join(", ");

// All settings whose name or meaning contains what is typed. `prefill(setting)` goes to the form.
function allSettings(list, prefill) {
  const box = input("filter", "", { type: "search", placeholder: "part of a name or meaning" });
  const place = make("div");
  const fill = () => {
    const part = box.value.toLowerCase();
    const fitting = list.filter((one) => `${one.name} ${one.documentation}`.toLowerCase().includes(part));
    place.replaceChildren(fitting.length
      ? table("All settings of the topic", ["Setting", ["Value", "breaks"], ["Default", "breaks"], ["From", "short"], ["", "short"]],
        fitting.map((one) => [
          described(one), shown(one.value), one.source === "topic" ? shown(one.default) : ["the same", "quiet"], one.source,
          make("button", { type: "button", class: "plain", "aria-label": `change ${one.name}`, onclick: () => prefill(one) }, "change"),
        ]))
      : quiet("No setting has that in its name or meaning."));
  };
  box.addEventListener("input", fill);
  fill();
  return [make("h2", {}, "All settings"), make("div", { class: "row" }, label("Filter", box)), place];
}

export const settings = {
  kind: "topic",
  still: true,
  async load(name) {
    const path = "topics/" + encodeURIComponent(name);
    return Promise.all([
      api(path, { limit: 0 }),
      // Of who may not describe settings.
      api(path + "/config").catch((error) => ({ settings: [], error: error.message })),
      allowed(),
    ]);
  },
  render([found, all, actions], page) {
    const topic = found.name;
    const known = new Map(all.settings.map((one) => [one.name, one]));
    const given = Object.entries(found.config || {}).map(([setting, value]) => known.get(setting) || { name: setting, value });
    const name = input("name", "", { required: true, list: "names" });
    const what = select("what", [["set", "set to"], ["delete", "back to the default"]], "set");
    const value = input("value", "");
    const meaning = make("p", { class: "meaning", role: "status" });
    const changed = () => {
      value.disabled = what.value === "delete";
      const chosen = known.get(name.value);
      meaning.textContent = chosen ? `${range(chosen)}. ${chosen.documentation}` : "";
    };
    const prefill = (setting) => {
      name.value = setting.name;
      value.value = setting.value ?? "";
      what.value = "set";
      changed();
      change.adapt();
      value.focus();
    };
    const change = actionForm({
      id: "alter",
      title: "Change a setting",
      fields: [label("Setting", name), label("Is", what), label("Value", value)],
      preview: meaning,
      submit: "Change the setting",
      changed,
      command: () => what.value === "set"
        ? kept(["topic", "alter"], topic, [["--config", `${name.value || "NAME"}=${value.value}`]])
        : kept(["topic", "alter"], topic, [["--delete-config", name.value || "NAME"]]),
      send: () => api("topics/alter", {}, what.value === "set"
        ? { topic, set: { [name.value]: value.value } }
        : { topic, delete: [name.value] }),
      done: () => ["Changed. ", make("button", { type: "button", onclick: page.refresh }, "Load the settings again")],
    }, actions);
    const partitions = input("partitions", "", { type: "number", required: true, min: found.partition_count + 1 });
    return [
      ...topicHead(topic, "settings"),
      offNote(actions),
      given.length
        ? table("Settings that the topic has of its own", ["Set for this topic", ["Value", "breaks"], ["Default", "breaks"], ""], given.map((one) => [
          make("code", {}, one.name), shown(one.value), known.has(one.name) ? shown(one.default) : "–",
          make("button", { type: "button", class: "plain", "aria-label": `change ${one.name}`, onclick: () => prefill(one) }, "change"),
        ]))
        : quiet(found.config ? "All its settings are at their defaults." : "You may not see its settings (DescribeConfigs)."),
      make("datalist", { id: "names" }, all.settings.map((one) => make("option", { value: one.name }))),
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
      all.error ? quiet(`All settings with their defaults are not shown: ${all.error}`) : allSettings(all.settings, prefill),
    ];
  },
};
