// Records of one partition by offset or time, with what is missing between them, and why.
import { api } from "./api.js";
import { count, crumbs, form, hash, hashWith, input, label, link, make, quiet, select, table } from "./dom.js";
import { FORMATS } from "./payload.js";
import { HEADS, recordRow } from "./rows.js";

const LIMIT = 25;
let format = "auto";

// Offsets that are not there.
function gap(from, end, topic, partition) {
  const answer = make("span", { role: "status" });
  const why = make("button", {
    type: "button",
    class: "plain",
    onclick: async () => {
      try {
        const found = await api("compaction/why-missing", { topic, partition, offset: from });
        answer.textContent = ` Offset ${count(from)}: ${found.explanation}.`;
      } catch (error) {
        answer.textContent = ` ${error.message}`;
      }
    },
  }, "why?");
  const text = end - from === 1 ? `Offset ${count(from)} is not there: ` : `Offsets ${count(from)} to ${count(end - 1)} are not there: `;
  return make("tr", { class: "gap" }, make("td", { colspan: HEADS.length }, text, why, answer));
}

function rows(found, topic, partition) {
  const made = [];
  let expected = found.first_offset;
  for (const record of found.records) {
    if (record.offset > expected) made.push(gap(expected, record.offset, topic, partition));
    made.push(recordRow({ ...record, partition: Number(partition) }, topic, format));
    expected = record.offset + 1;
  }
  if (found.next_offset > expected) made.push(gap(expected, found.next_offset, topic, partition));
  return made;
}

const TIME = "2026-11-21 14:05, or milliseconds";

// Milliseconds of what people type as a time, NaN where it is none that a node takes.
function millisecondsOf(text) {
  const ms = /^\d{5,}$/.test(text) ? Number(text) : new Date(text).getTime();
  return Number.isSafeInteger(ms) && ms >= 0 ? ms : NaN;
}

// A time as people can type it again; one that no date has stays as it was given.
function timeText(given) {
  const at = new Date(Number(given));
  return Number.isNaN(at.getTime()) ? given : at.toISOString();
}

// What is wrong with a value, "" if it is right.
function wrongValue(from, text) {
  if (from === "offset" && !(/^\d+$/.test(text) && Number.isSafeInteger(Number(text)))) {
    return `An offset is a number, as in 42, not "${text}".`;
  }
  if (from === "time" && Number.isNaN(millisecondsOf(text))) {
    return `A time is as in ${TIME}, from 1970 on, not "${text}".`;
  }
  return "";
}

function where(topic, partition, query, page) {
  const given = query.get("offset") !== null ? "offset" : query.get("timestamp") !== null ? "time" : "end";
  const from = select("from", [["end", "the end"], ["offset", "offset"], ["time", "time"]], given);
  const value = input("value", query.get("offset"));
  if (query.get("timestamp")) value.value = timeText(query.get("timestamp"));
  const shown = select("format", FORMATS, format);
  const adapt = () => {
    value.disabled = from.value === "end";
    value.placeholder = { offset: "42", time: TIME }[from.value] || "";
    value.setCustomValidity(wrongValue(from.value, value.value.trim()));
  };
  from.addEventListener("change", adapt);
  value.addEventListener("input", adapt);
  adapt();
  const at = (given) => hashWith(
    { ...given, format: shown.value === "auto" ? "" : shown.value }, "records", topic, partition,
  );
  const same = () => at({ offset: query.get("offset"), timestamp: query.get("timestamp") });
  shown.addEventListener("change", () => page.go(same()));
  return form("Which records", [
    label("From", from),
    label("Value", value),
    make("button", { class: "main" }, "Show"),
    label("Bytes as", shown),
  ], () => {
    const wanted = value.value.trim();
    if (from.value === "offset") page.go(at({ offset: wanted }));
    else if (from.value === "time") page.go(at({ timestamp: millisecondsOf(wanted) }));
    else page.go(at({}));
  });
}

export const browse = {
  kind: "topic",
  still: true,
  async load(topic, partition, query) {
    const wanted = {
      topic,
      partition,
      limit: query.get("limit") || LIMIT,
      offset: query.get("offset"),
      timestamp: query.get("timestamp"),
    };
    return [await api("records", wanted), topic, partition, query];
  },
  render([found, topic, partition, query], page) {
    format = query.get("format") || "auto";
    const shownAs = format === "auto" ? "" : format;
    const at = (offset) => hashWith({ offset, format: shownAs }, "records", topic, partition);
    const earlier = Math.max(found.log_start_offset, found.first_offset - LIMIT);
    const any = found.records.length || found.next_offset > found.first_offset;
    const shown = any
      ? table(`Records of ${topic}, partition ${partition}`, HEADS, rows(found, topic, partition))
      : quiet("There is no record from there on.");
    if (any) shown.querySelector("table").classList.add("records");
    return [
      crumbs(link("#topics", "Topics"), link(hash("topic", topic), topic), link(hash("records", topic), "records"),
        link(hash("topic", topic, partition), `partition ${partition}`)),
      make("h1", {}, `Records of ${topic}, partition ${partition}`),
      where(topic, partition, query, page),
      shown,
      make("nav", { class: "row", "aria-label": "More records" },
        found.first_offset > found.log_start_offset ? link(at(earlier), "earlier") : "",
        found.next_offset < found.high_watermark ? link(at(found.next_offset), "later") : "",
        link(at(found.log_start_offset), "the first"),
        link(at(""), "the last")),
      quiet(`There are offsets ${count(found.log_start_offset)} to ${count(found.high_watermark)}.`),
    ];
  },
};
