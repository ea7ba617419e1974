// Making the document. Everything is put into it as text; no markup is made of strings anywhere.

export function make(tag, given, ...children) {
  return fill(document.createElement(tag), given, children);
}

export function drawn(tag, given, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), given, children);
}

function fill(element, given, children) {
  for (const [name, value] of Object.entries(given || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== "" && child !== false) {
      element.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
    }
  }
  return element;
}

// Characters that turn the direction of others make text look like another one: they are spelled out.
const TURNING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
export const visible = (text) => text.replace(
  TURNING, (turning) => `\\u${turning.charCodeAt(0).toString(16).padStart(4, "0")}`,
);

// A column is [head, kind]; a cell is a value or [value, kind]. On a phone a row is a card.
export function table(caption, columns, rows) {
  const heads = columns.map((column) => Array.isArray(column) ? column : [column]);
  const cell = (value, i) => {
    const [content, kind] = Array.isArray(value) ? value : [value];
    const classes = [heads[i][1], kind, i ? "" : "first"].filter(Boolean).join(" ");
    return make("td", { class: classes || null, "data-head": heads[i][0] }, content);
  };
  const head = ([text, kind]) =>
    text ? make("th", { scope: "col", class: kind }, text) : make("td", { class: kind });
  return make("div", { class: "scroll" }, make("table", { class: "cards" },
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, heads.map(head))),
    make("tbody", {}, rows.map((row) =>
      row instanceof Node ? row : make("tr", {}, row.map(cell))))));
}

const pairs = (name, list) => make("dl", { class: name }, list.filter(Boolean).map(
  ([term, value, kind]) =>
    make("div", {}, make("dt", {}, term), make("dd", { class: kind }, value)),
));
export const facts = (list) => pairs("facts", list);
export const tiles = (list) => pairs("tiles", list);
export const quiet = (...children) => make("p", { class: "quiet" }, children);
export const link = (hash, ...children) => make("a", { href: hash }, children);
export const button = (hash, ...children) => make("a", { class: "button", href: hash }, children);
export const crumbs = (...parts) =>
  make("p", { class: "crumbs" }, parts.flatMap((part, i) => i ? [" / ", part] : [part]));
export const hash = (...parts) => "#" + parts.map((part) => encodeURIComponent(part)).join("/");
export const hashWith = (query, ...parts) => {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null);
  return hash(...parts) + (given.length ? "?" + new URLSearchParams(given) : "");
};

const option = ([value, text]) => make("option", { value }, text);
export function select(id, options, chosen) {
  const made = make("select", { id }, options.map(option));
  made.value = chosen;
  return made;
}
export function input(id, value, given = {}) {
  const made = make("input", { id, autocomplete: "off", spellcheck: "false", ...given });
  made.value = value ?? "";
  return made;
}
export function tick(id, text, ticked, changed) {
  const box = make("input", { type: "checkbox", id, oninput: () => changed(box.checked) });
  box.checked = ticked;
  return make("label", { class: "tick" }, box, text);
}
export const label = (text, control) => make("label", {}, text, control);
export function form(name, children, submitted) {
  return make("form", {
    "aria-label": name,
    onsubmit: (event) => {
      event.preventDefault();
      submitted();
    },
  }, children);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
export function bytes(number) {
  if (number === null || number === undefined) return "–";
  let unit = 0;
  while (number >= 1024 && unit < UNITS.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit ? number.toFixed(1) : Math.round(number)} ${UNITS[unit]}`;
}
export const count = (number) =>
  number === null || number === undefined ? "–" : Number(number).toLocaleString("en");
export function plural(number, singular) {
  const ending = /(s|x|ch)$/.test(singular) ? "es" : "s";
  return `${count(number)} ${singular}${number === 1 ? "" : ending}`;
}
export const percent = (ratio) =>
  ratio === null || ratio === undefined ? "–" : `${Math.round(ratio * 100)} %`;

const pad = (number, width = 2) => String(number).padStart(width, "0");
const dayOf = (at) => `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
export const timeOf = (at) => `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
export function moment(ms, fine = false) {
  if (ms === null || ms === undefined || ms < 0) return "never";
  const at = new Date(ms);
  if (Number.isNaN(at.getTime())) return String(ms);
  const text = `${dayOf(at)} ${timeOf(at)}${fine ? "." + pad(at.getMilliseconds(), 3) : ""}`;
  return make("time", { datetime: at.toISOString() }, text);
}
