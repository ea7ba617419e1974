// Command lines that do what the page does, to copy.
import { make, visible } from "./dom.js";

const PLAIN = /^[A-Za-z0-9_@%+=:,./-]+$/;
export const quoted = (word) => PLAIN.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;

// HOST:PORT of an address, of which a browser leaves out the port that is usual.
const bootstrap = ({ protocol, hostname, port }) =>
  `${hostname}:${port || (protocol === "https:" ? 443 : 80)}`;

// `kept WORDS… NAME OPTIONS…` as a POSIX shell takes it; options without a value are left out. A
// name or a value that begins with a dash is not taken for an option. The cluster is always named:
// a context or a variable at whoever runs the line may name another one.
export function kept(words, name, options = []) {
  const given = [...options, ["--bootstrap", bootstrap(location)]].filter(([, value]) => value !== "" && value !== null)
    .flatMap(([option, value]) =>
      String(value).startsWith("-") ? [`${option}=${value}`] : [option, String(value)]);
  const parts = name.startsWith("-")
    ? ["kept", ...words, ...given, "--", name]
    : ["kept", ...words, name, ...given];
  return parts.map(quoted).join(" ");
}

const SHOWN_MS = 2000;

// Copies what `text()` is when it is pressed.
export function copyButton(text, name = "Copy") {
  const made = make("button", {
    type: "button",
    class: "small",
    onclick: async () => {
      made.textContent = await copied(text()) ? "Copied" : "Not copied";
      setTimeout(() => { made.textContent = name; }, SHOWN_MS);
    },
  }, name);
  return made;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* not where the page came by http from another machine */ }
  const area = make("textarea", { class: "outside" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

// A command line in a box; `show(text)` puts another one into it.
export function commandBox(text) {
  let line = text;
  const code = make("code", {}, text);
  const show = (other) => {
    line = other;
    code.textContent = visible(other);
  };
  return { box: make("div", { class: "command" }, code, copyButton(() => line)), show };
}

// What an empty page says: in which way the first one comes to be.
export const first = (text, line) => make("div", { class: "empty" },
  make("p", {}, text), commandBox(line).box);
