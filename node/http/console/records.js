// The records of a topic: searched over all its partitions, the newest first; or as they come.
import { api, search as queryString } from "./api.js";
import { first, kept } from "./command.js";
import {
  button, bytes, form, hash, hashWith, input, label, link, make, plural, quiet, select, table,
} from "./dom.js";
import { FORMATS } from "./payload.js";
import { HEADS, recordRow } from "./rows.js";
import { topicHead } from "./topic.js";

const PAGE = 50; // records of a search at a time
const MOST_REQUESTS = 20; // until people say whether it is to go on
const TAIL_ROWS = 200;
const MOST_UNREAD = 3;
const RECONNECT_MS = 10000;
const FILTERS = ["key", "key_base64", "contains", "header", "partition"];

let format = "auto";
let leave = () => {};

const pad = (number) => String(number).padStart(2, "0");
function localTime(ms) {
  const at = new Date(Number(ms));
  if (!ms || Number.isNaN(at.getTime())) return "";
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}T${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}

function filters(topic, partitions, query, page) {
  const given = (name) => query.get(name) || "";
  const key = input("key", given("key"), { placeholder: "the whole key" });
  const contains = input("contains", given("contains"), { placeholder: "text in the value" });
  const header = input("header", given("header"), { placeholder: "name, or name=text" });
  const from = input("from", localTime(given("from")), { type: "datetime-local", step: 1 });
  const to = input("to", localTime(given("to")), { type: "datetime-local", step: 1 });
  const all = Array.from({ length: partitions }, (_, i) => [String(i), String(i)]);
  const partition = select("partition", [["", "all"], ...all], given("partition"));
  const order = select("order", [["", "newest first"], ["oldest", "oldest first"]], given("order"));
  const shown = select("format", FORMATS, format);
  const wanted = (tail) => hashWith({
    key: key.value,
    key_base64: key.value ? "" : given("key_base64"),
    contains: contains.value,
    header: header.value,
    partition: partition.value,
    from: tail || !from.value ? "" : new Date(from.value).getTime(),
    to: tail || !to.value ? "" : new Date(to.value).getTime(),
    order: tail ? "" : order.value,
    tail: tail ? "1" : "",
    format: shown.value === "auto" ? "" : shown.value,
  }, "records", topic);
  shown.addEventListener("change", () => page.go(wanted(query.get("tail") !== null)));
  const more = ["header", "from", "to", "order", "format"].some(given);
  return form("Search records", [
    label("Key", key),
    label("Value contains", contains),
    label("Partition", partition),
    make("button", { class: "main", id: "search" }, "Search"),
    make("button", { type: "button", id: "tail", onclick: () => page.go(wanted(true)) }, "Live tail"),
    make("details", { id: "more-filters", open: more },
      make("summary", {}, "Header, time, order, format"),
      make("div", { class: "row" },
        label("Header", header), label("From", from), label("To, before", to),
        label("Order", order), label("Bytes as", shown))),
  ], () => page.go(wanted(false)));
}

const chosen = (query) =>
  Object.fromEntries(FILTERS.map((name) => [name, query.get(name)]).filter(([, value]) => value));

// A search that goes on by cursor until it has a page of records, or is stopped.
function searching(topic, query, body) {
  const progress = make("p", { class: "quiet", role: "status", id: "progress" }, "Searching …");
  const more = make("button", { type: "button", id: "more", hidden: true }, "More");
  const stop = make("button", { type: "button", id: "stop" }, "Stop");
  const failure = make("p", { class: "bad", role: "alert" });
  const known = make("div");
  const asked = {
    topic,
    ...chosen(query),
    from: query.get("from"),
    to: query.get("to"),
    newest: query.get("order") !== "oldest",
    limit: PAGE,
  };
  const sum = { found: 0, records: 0, bytes: 0, skipped: 0 };
  let cursor = null;
  let answer = null; // the last one
  let running = false;

  const say = () => {
    const done = answer.ends.filter((end) => end.done).length;
    const state = answer.cursor === null ? "All was searched"
      : running ? "Searching" : "Not all was searched";
    const searched = `${done} of ${plural(answer.ends.length, "partition")} to the end`;
    progress.textContent = `${plural(sum.found, "record")} found. ${state}: looked at ${plural(sum.records, "record")}, ` +
      `${bytes(sum.bytes)}; ${searched}.` +
      (sum.skipped ? ` ${plural(sum.skipped, "batch")} too large to look at.` : "");
    const wrong = answer.ends.filter((end) => end.error);
    failure.textContent = wrong.map((end) => `Partition ${end.partition}: ${end.error}.`).slice(0, 3).join(" ");
    const at = answer.partition_of_key;
    if (at !== null && !known.childElementCount) {
      known.append(make("p", {}, `Producers put this key into partition ${at}: it is searched first. `,
        link(hashWith({ key: query.get("key") || "", key_base64: query.get("key_base64") || "" }, "key", topic, at), "History of this key")));
    }
  };

  async function run() {
    const until = sum.found + PAGE;
    let requests = 0;
    running = true;
    more.hidden = true;
    stop.hidden = false;
    try {
      do {
        answer = await api("search", { ...asked, limit: until - sum.found, cursor });
        if (!body.isConnected) return;
        for (const record of answer.records) body.append(recordRow(record, topic, format));
        sum.found += answer.records.length;
        sum.records += answer.scanned.records;
        sum.bytes += answer.scanned.bytes;
        sum.skipped += answer.scanned.batches_skipped;
        cursor = answer.cursor;
        requests += 1;
        const some = answer.ends.some((end) => !end.done && !end.error); // that a request goes on with
        running = running && cursor !== null && some && sum.found < until && requests < MOST_REQUESTS;
        say();
      } while (running);
    } catch (error) {
      running = false;
      if (answer) say();
      else progress.textContent = "";
      failure.textContent = error.message;
    }
    running = false;
    stop.hidden = true;
    more.hidden = cursor === null;
    if (!sum.found && cursor === null && !failure.textContent) {
      known.append(Object.keys(chosen(query)).length || query.get("from") || query.get("to")
        ? quiet("No record fits.")
        : first("The topic has no records. This appends one:", `echo 'alice:hello' | ${kept(["produce"], topic, [["--key-separator", ":"]])}`));
    }
  }

  more.addEventListener("click", run);
  stop.addEventListener("click", () => { running = false; });
  leave = () => { running = false; };
  return { before: [known, failure], after: make("div", { class: "row" }, more, stop, progress), run };
}

// Records as they come, the newest on top. While it is paused they are counted, and shown afterwards.
function tailing(topic, query, body) {
  const status = make("p", { class: "quiet", role: "status", id: "progress" }, "Connecting …");
  const pause = make("button", { type: "button", id: "pause", "aria-pressed": "false" }, "Pause");
  const waiting = make("span", { class: "quiet", id: "waiting" });
  const address = "/api/v1/tail" + queryString({ topic, ...chosen(query) });
  let source = null;
  let held = null; // records that came while it is paused
  let missed = 0;
  let unread = []; // the last offsets that could not be read
  let reconnect = 0;

  const show = (records) => {
    for (const record of records) body.prepend(recordRow(record, topic, format));
    const rows = body.querySelectorAll("tr.record");
    for (let i = TAIL_ROWS; i < rows.length; i += 1) rows[i].remove();
  };
  const say = (partitions) => {
    status.textContent = `Following ${plural(partitions, "partition")}.` +
      (missed ? ` ${plural(missed, "record")} left out: more came than are shown.` : "") +
      unread.map(({ partition, begin, end, why }) =>
        ` Partition ${partition}: offsets ${begin} to ${end - 1} could not be read: ${why}.`).join("");
  };
  function connect() {
    source = new EventSource(address);
    source.onmessage = (event) => {
      const told = JSON.parse(event.data);
      missed += told.left_out - told.skipped.reduce((sum, { begin, end }) => sum + end - begin, 0);
      unread = [...unread, ...told.skipped].slice(-MOST_UNREAD);
      if (held) {
        held.push(...told.records);
        missed += Math.max(0, held.length - TAIL_ROWS);
        held = held.slice(-TAIL_ROWS);
        waiting.textContent = `${plural(held.length, "record")} came since.`;
      } else show(told.records);
      say(told.partitions);
    };
    source.onerror = () => {
      if (source.readyState !== EventSource.CLOSED) {
        status.textContent = "The connection broke; it is made again.";
        return;
      }
      status.textContent = "The node gives no stream now (kept.console.max.streams bounds them): it is tried again.";
      reconnect = setTimeout(connect, RECONNECT_MS);
    };
  }
  const stop = () => {
    clearTimeout(reconnect);
    if (source) source.close();
  };
  const hidden = () => {
    stop();
    if (!document.hidden) connect();
  };
  pause.addEventListener("click", () => {
    const records = held;
    held = records ? null : [];
    if (records) show(records);
    waiting.textContent = "";
    pause.textContent = held ? "Resume" : "Pause";
    pause.setAttribute("aria-pressed", String(Boolean(held)));
  });
  document.addEventListener("visibilitychange", hidden);
  leave = () => {
    stop();
    document.removeEventListener("visibilitychange", hidden);
  };
  const end = hashWith({ ...chosen(query), format: query.get("format") || "" }, "records", topic);
  return {
    before: make("div", { class: "row" }, pause, button(end, "Stop the tail"), waiting, status),
    after: "",
    run: connect,
  };
}

export const records = {
  kind: "topic",
  still: true,
  async load(name, query) {
    return [await api("topics/" + encodeURIComponent(name), { limit: 0 }), query];
  },
  render([found, query], page) {
    leave();
    format = query.get("format") || "auto";
    const topic = found.name;
    const tail = query.get("tail") !== null;
    const shown = table(`Records of ${topic}`, HEADS, []);
    const body = shown.querySelector("tbody");
    shown.querySelector("table").classList.add("records");
    const way = (tail ? tailing : searching)(topic, query, body);
    setTimeout(way.run); // when it is in the page
    return [
      ...topicHead(topic, "records"),
      filters(topic, found.partition_count, query, page),
      way.before,
      shown,
      way.after,
      tail ? "" : quiet("By offset: ", Array.from({ length: Math.min(found.partition_count, 32) }, (_, i) =>
        [" ", link(hash("records", topic, i), `partition ${i}`)])),
    ];
  },
  leave() {
    leave();
    leave = () => {};
  },
};
