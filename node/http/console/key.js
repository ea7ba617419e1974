// The history of a key: its records in the log, and what compaction did and will do.
import { api } from "./api.js";
import { bytes, count, crumbs, form, hash, hashWith, input, label, link, make, moment, plural, quiet, table } from "./dom.js";
import { raw, rendered, text } from "./payload.js";

const FATES = {
  survives: "stays",
  superseded: "removed by the next compaction: superseded",
  "not cleanable yet": "stays: not cleanable yet",
};

// What follows of a key from offsets without keys: a pass keeps the newest record, and a tombstone
// until its time is over.
function before({ records: left, passes }) {
  const all = {};
  for (const pass of passes) {
    for (const [why, number] of Object.entries(pass.removed)) all[why] = (all[why] || 0) + number;
  }
  const removed = Object.entries(all).map(([why, number]) => `${count(number)} ${why}`).join(", ");
  const gone = all["expired tombstone"] || all["as the leader decided"];
  let known = "No compaction in the journal removed a tombstone: if the key was here, that was before, or retention removed it";
  if (left.length) {
    known = `If the key had records before offset ${count(left[0].offset)}, others superseded them, or it was deleted in between`;
  } else if (gone) {
    known = "If the key was here, it was deleted and its tombstone has expired, or retention removed it";
  }
  return `${known}; of all keys they removed: ${removed || "nothing"}.`;
}

function whyMissing(topic, partition, key) {
  const offset = input("missing", "", { inputmode: "numeric" });
  const answer = make("p", { role: "status" });
  const asked = form("Why an offset is missing", [
    label("Why is an offset not there?", offset), make("button", {}, "Explain"),
  ], async () => {
    try {
      const found = await api("compaction/why-missing", { topic, partition, offset: offset.value.trim(), ...key });
      const newest = found.winner ? ` The key's newest record is at ${found.winner.offset}.` : "";
      answer.textContent = `Offset ${found.offset}: ${found.explanation}.${newest}`;
    } catch (error) {
      answer.textContent = error.message;
    }
  });
  return [asked, answer];
}

export const life = {
  kind: "topic",
  still: true,
  async load(topic, ...rest) {
    const query = rest.pop();
    const key = query.get("key_base64")
      ? { key_base64: query.get("key_base64") } : { key: query.get("key") || "" };
    const found = await api("records/key", { topic, partition: rest[0], ...key });
    const where = `Producers put this key into partition ${found.partition}.`;
    if (rest.length) return [found, topic, key, `In partition ${rest[0]}.`];
    if (found.records.length) return [found, topic, key, where];
    // Some producers choose partitions in their own way: where is it?
    const { records: [elsewhere] } = await api("search", { topic, ...key, limit: 1 });
    if (!elsewhere) return [found, topic, key, where];
    const { partition } = elsewhere;
    const other = await api("records/key", { topic, partition, ...key });
    return [other, topic, key, `Found in partition ${partition}; p${where.slice(1)}`];
  },
  render([found, topic, key, where], page) {
    const { partition } = found;
    const at = hash("records", topic, partition);
    const oldest = found.passes[found.passes.length - 1];
    const shown = key.key ?? text(raw(key.key_base64)) ?? "";
    const box = input("key", shown, { required: true });
    const rows = found.records.map((one) => [
      link(`${at}?offset=${one.offset}`, count(one.offset)),
      moment(one.timestamp, true),
      one.is_tombstone ? make("span", { class: "badge" }, "tombstone") : bytes(one.value_bytes),
      [FATES[one.fate] || one.fate, one.removable_at_ms ? [", may be removed from ", moment(one.removable_at_ms), " on"] : ""].flat(),
    ]);
    return [
      crumbs(link("#topics", "Topics"), link(hash("topic", topic), topic), link(hash("topic", topic, partition), `partition ${partition}`)),
      make("h1", {}, "History of a key"),
      form("Another key", [label("Key", box), make("button", { class: "main" }, "Show")],
        () => page.go(hashWith({ key: box.value }, "key", topic))),
      make("pre", {}, key.key_base64 ? rendered(raw(key.key_base64), "auto") : key.key),
      quiet(where, " ", link(hashWith(key, "records", topic), "Search all partitions for it")),
      rows.length
        ? table("Records of the key, oldest first", [["Offset", "number"], "Time", ["Value", "number"], "Next compaction"], rows)
        : quiet("No record of this key is in the log of this partition."),
      make("h2", {}, "Before that"),
      quiet(oldest
        ? ["Compaction removed older records. The removal journal reaches back to generation ", make("strong", {}, oldest.generation), " of ",
          moment(oldest.at_ms), ` and knows ${plural(found.passes.length, "pass")}; it knows offsets, not keys.`]
        : "No compaction has removed anything here: these are all records of the key since the log start."),
      oldest ? quiet(before(found)) : "",
      whyMissing(topic, partition, key),
    ];
  },
};
