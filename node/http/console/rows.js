// Records as rows of a table: each in one line, unfolded by a button.
import { api } from "./api.js";
import { copyButton } from "./command.js";
import { bytes, count, facts, hash, hashWith, link, make, moment, table } from "./dom.js";
import { oneLine, raw, rendered } from "./payload.js";

export const HEADS = [["", "unfold"], ["Time", "time"], ["Partition", "number"], ["Offset", "number"], "Key", ["Value", "wide"]];

const NULL = () => make("em", { class: "quiet" }, "null");
const badge = (text) => make("span", { class: "badge" }, text);

function line(base64, format) {
  return base64 === null ? NULL() : make("span", { class: "line" }, oneLine(raw(base64), format));
}

function valueLine(record, format) {
  const marks = [
    record.is_tombstone ? badge("tombstone") : "",
    record.transaction && record.transaction !== "committed" ? badge(`transaction ${record.transaction}`) : "",
  ];
  return [marks, record.is_tombstone ? "" : line(record.value_base64, format)];
}

function payload(title, base64, size, format) {
  if (base64 === null) return make("section", {}, make("h2", {}, title), NULL());
  const data = raw(base64);
  const shown = rendered(data, format);
  const cut = size > data.length ? `, the first ${bytes(data.length)}` : "";
  return make("section", {},
    make("div", { class: "row head" }, make("h2", {}, `${title}, ${bytes(size)}${cut}`), copyButton(() => shown)),
    make("pre", { tabindex: "0", role: "region", "aria-label": title }, shown));
}

function headers(record, format) {
  if (!record.headers.length) return "";
  const rows = record.headers.map((header) => [
    make("code", {}, header.name),
    header.value_base64 === null ? NULL() : make("pre", {}, rendered(raw(header.value_base64), format)),
  ]);
  return make("section", {}, make("h2", {}, "Headers"), table("Headers", ["Name", "Value"], rows),
    record.headers_left_out ? make("p", { class: "quiet" }, `and ${count(record.headers_left_out)} more`) : "");
}

function detail(record, topic, format) {
  const { partition, offset } = record;
  const place = make("div", { class: "detail" });
  const fill = (shown) => place.replaceChildren(
    facts([
      ["Time", moment(shown.timestamp, true)],
      ["Partition", link(hash("topic", topic, partition), partition)],
      ["Offset", link(`${hash("records", topic, partition)}?offset=${offset}`, count(offset))],
      ["Transaction", shown.transaction || "none"],
    ]),
    payload("Key", shown.key_base64, shown.key_bytes, format),
    shown.key_base64 === null ? "" : make("p", {},
      link(hashWith({ key_base64: shown.key_base64 }, "key", topic, partition), "History of this key")),
    shown.is_tombstone
      ? make("section", {}, make("h2", {}, "Value"), badge("tombstone"))
      : payload("Value", shown.value_base64, shown.value_bytes, format),
    shown.is_tombstone || raw(shown.value_base64).length >= shown.value_bytes || shown !== record ? "" : make("button", {
      type: "button",
      onclick: async (event) => {
        event.target.disabled = true;
        const found = await api("records", { topic, partition, offset, limit: 1 });
        if (found.records.length && found.records[0].offset === offset) fill(found.records[0]);
      },
    }, "Load more of the value"),
    headers(shown, format));
  fill(record);
  return place;
}

// A row for a record, and below it, when it is unfolded, one with all of it.
export function recordRow(record, topic, format) {
  const { partition, offset } = record;
  const id = `record-${partition}-${offset}`;
  let below = null;
  const toggle = make("button", {
    type: "button", class: "toggle", "aria-expanded": "false", id,
    "aria-label": `Record ${partition}:${offset}`,
    onclick: () => {
      if (below) {
        below.remove();
        below = null;
      } else {
        below = make("tr", { class: "detail" }, make("td", { colspan: HEADS.length }, detail(record, topic, format)));
        row.after(below);
      }
      toggle.setAttribute("aria-expanded", String(Boolean(below)));
    },
  });
  const cells = [
    toggle,
    moment(record.timestamp, true),
    partition,
    count(offset),
    line(record.key_base64, format),
    valueLine(record, format),
  ];
  const row = make("tr", { class: "record" }, cells.map((content, i) => {
    const [head, kind] = [HEADS[i]].flat();
    return make("td", { "data-head": head, class: [kind, i < 4 ? "" : "payload"].filter(Boolean).join(" ") }, content);
  }));
  row.remove = () => {
    if (below) below.remove();
    Element.prototype.remove.call(row);
  };
  return row;
}
