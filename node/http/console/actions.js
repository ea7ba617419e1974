// Forms that change something: each shows the command line that does the same, and works where
// kept.console.actions is true; elsewhere the command line is left to copy.
import { recent } from "./api.js";
import { commandBox } from "./command.js";
import { input, label, make } from "./dom.js";

const SETTING = "kept.console.actions=true";
const FRESH_MS = 10000;

// Whether this node's page may change something. Who may not see the cluster is not told: he may
// press, and is told then what he may not do.
export const allowed = () =>
  recent("cluster", {}, FRESH_MS).then((cluster) => cluster.actions, () => true);

// What stands once on a page with such forms, where they are off.
export const offNote = (actions) => actions ? "" : make("p", { class: "off", id: "about-buttons" },
  "Buttons that change something are off. The setting ", make("code", {}, SETTING), " turns them on.");

// Lines of name=value as an object. Lines without a name are left out.
export function settingsOf(text) {
  const lines = text.split("\n").map((line) => line.trim()).filter((line) => line.indexOf("=") > 0);
  return Object.fromEntries(lines.map((line) => {
    const at = line.indexOf("=");
    return [line.slice(0, at).trim(), line.slice(at + 1).trim()];
  }));
}

// `command()` is the command line as of now, `send()` does it and gives {done, error, command},
// `done(result)` what is said then. `typed` is a name that has to be typed before; `ready()` says
// whether it may be sent; `changed()` is called when a field is changed; `preview` is an element
// between the fields and the rest.
export function actionForm(action, actions) {
  const { id, title, note, fields, submit, command, send, done, typed } = action;
  const line = commandBox(command());
  const result = make("p", { role: "status" });
  const failure = make("p", { role: "alert", class: "bad" });
  const check = typed ? input(`${id}-typed`, "", { required: true }) : null;
  const press = make("button", {
    class: typed ? "main dangerous" : "main",
    id: `${id}-submit`,
    "aria-describedby": actions ? null : "about-buttons",
  }, submit);
  const adapt = () => {
    line.show(command());
    const ready = (!typed || check.value === typed) && (!action.ready || action.ready());
    press.disabled = !actions || !ready;
  };
  const made = make("form", { class: "action", "aria-label": title || submit, id },
    make("div", { class: "row" }, fields),
    action.preview || "",
    check ? label(`Type ${typed} to go on`, check) : "",
    make("p", { class: "quiet small" }, "The same on a command line:"), line.box,
    make("div", { class: "row" }, press), result, failure);
  made.addEventListener("input", (event) => {
    if (action.changed && event.target !== check) action.changed();
    adapt();
  });
  made.addEventListener("submit", async (event) => {
    event.preventDefault();
    result.replaceChildren();
    failure.replaceChildren();
    press.disabled = true;
    try {
      const sent = await send();
      if (sent.error) failure.append(sent.error);
      else result.append(...make("span", {}, done(sent)).childNodes);
      if (check && !sent.error) check.value = "";
    } catch (error) {
      failure.append(error.message);
    }
    adapt();
  });
  adapt();
  const section = make("section", {}, title ? make("h2", {}, title) : "",
    note ? make("p", { class: "quiet" }, note) : "", made);
  section.adapt = adapt;
  return section;
}
