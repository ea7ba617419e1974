// Command lines that do what the page does, to copy.
import { make } from "./dom.js";

const PLAIN = /^[A-Za-z0-9_@%+=:,./-]+$/;
const quoted = (word) => PLAIN.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;

// `kept` and words, as a POSIX shell takes them; with the address where it is not the usual one.
export function kept(...words) {
  const here = location.host;
  const where = here === "localhost:9092" ? [] : ["--bootstrap", here];
  return ["kept", ...words.filter((word) => word !== ""), ...where].map((word) => quoted(String(word))).join(" ");
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
  const code = make("code", {}, text);
  const box = make("div", { class: "command" }, code, copyButton(() => code.textContent, "Copy"));
  return { box, show: (other) => { code.textContent = other; } };
}

// What an empty page says: in which way the first one comes to be.
export const first = (text, line) => make("div", { class: "empty" },
  make("p", {}, text), commandBox(line).box);
