// A form that appends one record to a topic.
import { actionForm, allowed, offNote } from "./actions.js";
import { api } from "./api.js";
import { kept, quoted } from "./command.js";
import { count, hash, input, label, link, make, tick } from "./dom.js";
import { respaced } from "./payload.js";
import { topicHead } from "./topic.js";

// Lines of name=value, of which a name may come twice.
function headersOf(text) {
  const lines = text.split("\n").filter((line) => line.indexOf("=") > 0);
  return lines.map((line) => {
    const at = line.indexOf("=");
    return { name: line.slice(0, at).trim(), value: line.slice(at + 1) };
  });
}

export const produce = {
  kind: "topic",
  still: true,
  async load(name) {
    return Promise.all([api("topics/" + encodeURIComponent(name), { limit: 0 }), allowed()]);
  },
  render([found, actions]) {
    const topic = found.name;
    const key = input("key", "", { placeholder: "none" });
    const value = make("textarea", { id: "value", rows: 6, spellcheck: "false" });
    const headers = make("textarea", { id: "headers", rows: 2, spellcheck: "false", placeholder: "name=value in each line" });
    const partition = input("partition", "", {
      type: "number", min: 0, max: found.partition_count - 1, placeholder: "by key",
    });
    let tombstone = false;
    const record = () => ({
      ...(partition.value === "" ? {} : { partition: Number(partition.value) }),
      ...(key.value === "" ? {} : { key: key.value }),
      ...(tombstone ? {} : { value: value.value }),
      ...(headers.value.trim() ? { headers: headersOf(headers.value) } : {}),
    });
    // The same record as `kept produce --json` reads it.
    const line = () => {
      const { headers: list, key: given, value: text, partition: at } = record();
      const json = JSON.stringify({
        key: given ?? null,
        value: text ?? null,
        ...(list ? { headers: list.map((header) => ({ key: header.name, value: header.value })) } : {}),
        ...(at === undefined ? {} : { partition: at }),
      });
      return `printf '%s\\n' ${quoted(respaced(json, 0))} | ${kept(["produce", "--json"], topic)}`;
    };
    return [
      ...topicHead(topic, "produce"),
      offNote(actions),
      actionForm({
        id: "produce",
        fields: [
          make("div", { class: "wide" }, label("Key", key)),
          label("Partition", partition),
          make("div", { class: "wide" }, label("Value", value)),
          tick("tombstone", "no value: a tombstone, which deletes the key", false, (ticked) => {
            tombstone = ticked;
            value.disabled = ticked;
          }),
          make("div", { class: "wide" }, label("Headers", headers)),
        ],
        submit: "Produce",
        command: line,
        ready: () => !tombstone || key.value !== "",
        send: () => api("produce", {}, { topic, ...record() }),
        done: (sent) => ["Appended to ",
          link(`${hash("records", topic, sent.partition)}?offset=${sent.offset}`, `partition ${sent.partition}, offset ${count(sent.offset)}`), "."],
      }, actions),
    ];
  },
};
