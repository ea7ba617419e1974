// Records of a partition: by offset, time or key; as text, JSON or hex. They are hostile input.
import { api } from "./ask.js";
import { bytes, count, crumbs, hash, link, make, moment, plural, quiet, table } from "./dom.js";

const LIMIT = 25;
const SHORT = 100; // characters of JSON that stand in one line
let format = "auto";

const raw = (base64) => Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));

function text(data) {
  try { return new TextDecoder("utf-8", { fatal: true }).decode(data); } catch { return null; }
}

function hex(data) {
  const lines = [];
  for (let at = 0; at < data.length; at += 16) {
    const row = [...data.slice(at, at + 16)];
    const numbers = row.map((one) => one.toString(16).padStart(2, "0")).join(" ").padEnd(47);
    lines.push(`${at.toString(16).padStart(6, "0")}  ${numbers}  ${row.map((one) => one > 31 && one < 127 ? String.fromCharCode(one) : ".").join("")}`);
  }
  return lines.join("\n");
}

const PRINTABLE = /^[^\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]*$/;

export function rendered(base64, wanted) {
  const data = raw(base64);
  if (wanted === "hex") return hex(data);
  const found = text(data);
  if (wanted === "text") return found === null ? new TextDecoder().decode(data) : found;
  if (found !== null && (wanted === "json" || PRINTABLE.test(found))) {
    try {
      const value = JSON.parse(found), line = JSON.stringify(value);
      return wanted !== "json" && line.length <= SHORT ? found : JSON.stringify(value, null, 2);
    } catch { return wanted === "json" ? `not JSON: ${found}` : found; }
  }
  return hex(data);
}

function payload(base64, size) {
  if (base64 === null) return make("em", { class: "quiet" }, "null");
  const cut = size > raw(base64).length;
  return [make("pre", { tabindex: "0" }, rendered(base64, format)), cut ? quiet(`${bytes(size)} in all; alone it is shown longer`) : ""];
}

function headers(record) {
  if (!record.headers.length) return "";
  return make("ul", { class: "legend" }, record.headers.map((one) => make("li", {}, make("code", {}, one.name), " = ", one.value_base64 === null ? "null" : rendered(one.value_base64, format))),
    record.headers_left_out ? make("li", {}, `and ${record.headers_left_out} more`) : "");
}

function gap(first, end, topic, number) {
  const answer = make("span", { role: "status" });
  const ask = make("button", { class: "plain", onclick: async () => {
    try {
      const found = await api("compaction/why-missing", { topic, partition: number, offset: first });
      answer.textContent = ` Offset ${count(first)}: ${found.explanation}.`;
    } catch (error) { answer.textContent = ` ${error.message}`; }
  } }, "why?");
  const said = end - first === 1 ? `Offset ${count(first)} is` : `Offsets ${count(first)} to ${count(end - 1)} are`;
  return make("tr", { class: "gap" }, make("td", { colspan: 5, class: "payload" }, `${said} not there: `, ask, answer));
}

function rows(found, topic, number) {
  const made = [];
  let expected = found.first_offset;
  for (const record of found.records) {
    if (record.offset > expected) made.push(gap(expected, record.offset, topic, number));
    expected = record.offset + 1;
    const search = new URLSearchParams({ key: record.key_base64 || "" });
    const cells = [
      ["Offset", link(`${hash("records", topic, number)}?offset=${record.offset}&limit=1`, count(record.offset)), "number first"],
      ["Time", moment(record.timestamp, true), "time"],
      ["Key", record.key_base64 === null ? payload(null, 0) : [payload(record.key_base64, record.key_bytes), link(`${hash("key", topic, number)}?${search}`, "its life")], "payload"],
      ["Value", record.is_tombstone ? make("span", { class: "badge" }, "tombstone") : payload(record.value_base64, record.value_bytes), "payload"],
      ["Headers", headers(record), "payload"]];
    made.push(make("tr", {}, cells.map(([head, content, kind]) => make("td", { class: kind, "data-head": head }, content))));
  }
  if (found.next_offset > expected) made.push(gap(expected, found.next_offset, topic, number));
  return made;
}

function form(topic, number, query, go) {
  const from = make("select", { id: "from" }, [["end", "the end"], ["offset", "offset"], ["time", "time"], ["key", "key"]].map(([value, name]) => make("option", { value }, name)));
  const value = make("input", { id: "value", autocomplete: "off" });
  const shown = make("select", { id: "format" }, ["auto", "text", "json", "hex"].map((one) => make("option", { value: one }, { auto: "what fits", text: "text", json: "JSON", hex: "hex" }[one])));
  from.value = query.get("offset") !== null ? "offset" : query.get("timestamp") !== null ? "time" : query.get("key") !== null ? "key" : "end";
  value.value = query.get("offset") || "";
  if (query.get("timestamp")) value.value = new Date(Number(query.get("timestamp"))).toISOString();
  if (query.get("key")) value.value = text(raw(query.get("key"))) || "";
  const adapt = () => { value.disabled = from.value === "end"; value.placeholder = { offset: "42", time: "2026-11-21 14:05, or milliseconds", key: "a key, as text" }[from.value] || ""; };
  from.addEventListener("change", adapt);
  adapt();
  shown.value = format;
  shown.addEventListener("change", () => { format = shown.value; go(null); });
  const made = make("form", { "aria-label": "Which records" }, make("label", {}, "From", from), make("label", {}, "Value", value), make("button", { class: "main" }, "Show"), make("label", {}, "Bytes as", shown));
  made.addEventListener("submit", (event) => {
    event.preventDefault();
    const at = hash("records", topic, number), wanted = value.value.trim();
    if (from.value === "offset") go(`${at}?offset=${encodeURIComponent(wanted)}`);
    else if (from.value === "time") go(`${at}?timestamp=${/^\d{5,}$/.test(wanted) ? wanted : new Date(wanted).getTime()}`);
    else if (from.value === "key") go(`${hash("key", topic, number)}?${new URLSearchParams({ key: btoa(String.fromCharCode(...new TextEncoder().encode(value.value))) })}`);
    else go(at);
  });
  return made;
}

const head = (topic, number, title, ...more) => [crumbs(link("#topics", "Topics"), link(hash("topic", topic), topic), link(hash("topic", topic, number), `partition ${number}`), ...more), make("h1", {}, title)];

export const records = {
  still: true,
  async ask(topic, number, query) {
    const wanted = { topic, partition: number, limit: query.get("limit") || LIMIT, offset: query.get("offset"), timestamp: query.get("timestamp") };
    return [await api("records", wanted), topic, number, query];
  },
  show([found, topic, number, query], refresh, act, go) {
    const at = hash("records", topic, number), limit = LIMIT;
    const earlier = Math.max(found.log_start_offset, found.first_offset - limit);
    return [...head(topic, number, "Records"), form(topic, number, query, go),
      found.records.length ? "" : quiet("There is no record from there on."),
      found.records.length || found.next_offset > found.first_offset ? table(`Records of ${topic}, partition ${number}`, [["Offset", "number"], "Time", "Key", ["Value", "wide"], "Headers"], rows(found, topic, number)) : "",
      make("nav", { class: "row", "aria-label": "More records" },
        found.first_offset > found.log_start_offset ? link(`${at}?offset=${earlier}`, "earlier") : "",
        found.next_offset < found.high_watermark ? link(`${at}?offset=${found.next_offset}`, "later") : "",
        link(`${at}?offset=${found.log_start_offset}`, "the first"), link(at, "the last")),
      quiet(`There are offsets ${count(found.log_start_offset)} to ${count(found.high_watermark)}.`)];
  },
};

const FATES = { survives: "is kept", superseded: "goes with the next pass: superseded", "not cleanable yet": "stays: not cleanable yet" };

// What follows of a key from offsets without keys: a pass keeps the newest record, and a tombstone until its time is over.
function before({ records: left, passes }) {
  const all = {};
  for (const pass of passes) for (const [why, number] of Object.entries(pass.removed)) all[why] = (all[why] || 0) + number;
  const told = Object.entries(all).map(([why, number]) => `${count(number)} ${why}`).join(", ");
  const gone = all["expired tombstone"] || all["as the leader decided"], of = `of all keys they removed: ${told || "nothing"}.`;
  const known = left.length ? `If the key had records before offset ${count(left[0].offset)}, others superseded them, or it was deleted in between`
    : gone ? "If the key was here, it was deleted and its tombstone has expired, or retention removed it"
      : "No pass in the journal removed a tombstone: if the key was here, that was before, or retention removed it";
  return `${known}; ${of}`;
}

export const life = {
  still: true,
  async ask(topic, number, query) {
    return [await api("records/key", { topic, partition: number, key_base64: query.get("key") }), topic, number, query];
  },
  show([found, topic, number, query], refresh, act, go) {
    const at = hash("records", topic, number), oldest = found.passes[found.passes.length - 1];
    const offset = make("input", { id: "missing", inputmode: "numeric", autocomplete: "off" }), answer = make("p", { role: "status" });
    const why = make("form", {}, make("label", {}, "Why is an offset not there?", offset), make("button", {}, "Ask"));
    why.addEventListener("submit", async (event) => {
      event.preventDefault();
      try {
        const said = await api("compaction/why-missing", { topic, partition: number, offset: offset.value.trim(), key_base64: query.get("key") });
        answer.textContent = `Offset ${said.offset}: ${said.explanation}.` + (said.winner ? ` The key's newest record is at ${said.winner.offset}.` : "");
      } catch (error) { answer.textContent = error.message; }
    });
    return [...head(topic, number, "The life of a key", link(at, "records")), form(topic, number, query, go), make("pre", {}, rendered(query.get("key"), format)),
      found.records.length ? table("Records of the key, oldest first", [["Offset", "number"], "Time", ["Value", "number"], "What becomes of it"], found.records.map((one) =>
        [link(`${at}?offset=${one.offset}&limit=1`, count(one.offset)), moment(one.timestamp, true), one.is_tombstone ? make("span", { class: "badge" }, "tombstone") : bytes(one.value_bytes), [FATES[one.fate] || one.fate, one.removable_at_ms ? [", may go at ", moment(one.removable_at_ms)] : ""].flat()])) : quiet("No record of this key is in the log."),
      make("h2", {}, "Before that"),
      quiet(oldest ? ["Passes removed older records. The removal journal reaches back to generation ", make("strong", {}, oldest.generation), " of ", moment(oldest.at_ms), ` and knows ${plural(found.passes.length, "pass").replace("passs", "passes")}; it knows offsets, not keys.`] : "No pass has removed anything here: this is the whole life of the key since the log start."),
      oldest ? quiet(before(found)) : "",
      why, answer];
  },
};
