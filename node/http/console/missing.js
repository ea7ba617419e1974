// What is shown in place of a view that could not be loaded.
import { api } from "./api.js";
import { hash, link, make, quiet } from "./dom.js";

const MOST_NEAR = 5;

const KNOWN = {
  topic: async () => (await api("topics")).topics.map((topic) => topic.name),
  group: async () => (await api("groups")).groups.map((group) => group.group),
  transaction: async () =>
    (await api("transactions")).transactions.map((one) => one.transactional_id),
};
const LISTS = { topic: "#topics", group: "#groups", transaction: "#transactions" };

// The Levenshtein distance, in edits; two neighbours that changed places are one.
function distance(from, to) {
  let before = [];
  let above = Array.from({ length: to.length + 1 }, (_, i) => i);
  for (let i = 1; i <= from.length; i += 1) {
    const row = [i];
    for (let j = 1; j <= to.length; j += 1) {
      const replaced = above[j - 1] + (from[i - 1] === to[j - 1] ? 0 : 1);
      const swapped = i > 1 && j > 1 && from[i - 1] === to[j - 2] && from[i - 2] === to[j - 1]
        ? before[j - 2] + 1 : replaced;
      row.push(Math.min(replaced, swapped, above[j] + 1, row[j - 1] + 1));
    }
    [before, above] = [above, row];
  }
  return above[to.length];
}

// Names that may be meant: with a part in common, or a few edits away; the nearest first.
function near(name, names) {
  const wanted = name.toLowerCase();
  const rated = names.map((other) => {
    const known = other.toLowerCase();
    const part = wanted.length > 2 && (known.includes(wanted) || wanted.includes(known));
    return [part ? 1 : distance(wanted, known), other];
  });
  const most = Math.max(1, Math.floor(wanted.length / 3));
  return rated.filter(([edits]) => edits <= most).sort((a, b) => a[0] - b[0])
    .slice(0, MOST_NEAR).map(([, other]) => other);
}

const KINDS = { topic: "topic", group: "consumer group", transaction: "transactional id" };

export async function missing(view, name, error) {
  if (error.status === 404 && view.kind && name) {
    const names = await KNOWN[view.kind]().catch(() => []);
    const meant = near(name, names);
    const route = (other) => link(hash(view.kind, other), other);
    if (names.includes(name)) { // it is there: what is not is within it, as a partition
      return [
        make("h1", {}, "This cannot be shown"),
        make("p", { class: "bad" }, error.message),
        quiet(route(name)),
      ];
    }
    return [
      make("h1", {}, `There is no ${KINDS[view.kind]} ${name}`),
      meant.length
        ? make("p", {}, "Did you mean ", meant.flatMap((other, i) => [i ? ", " : "", route(other)]), "?")
        : "",
      quiet(link(LISTS[view.kind], `All ${KINDS[view.kind]}s`)),
    ];
  }
  if (error.status === 403) {
    return [make("h1", {}, "Not allowed"), make("p", {}, error.message)];
  }
  return [
    make("h1", {}, error.status === 0 ? "This node does not answer" : "This cannot be shown"),
    make("p", { class: "bad" }, error.message),
    error.passing ? quiet("It is tried again every few seconds.") : "",
  ];
}
