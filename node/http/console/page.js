// Which view is shown, and when it is loaded again.
//
// A view is an object: `load(...names, query)` gives what `render(loaded, page)` makes nodes of. It
// is loaded again when something moves, at most every `pause` ms, and every `poll` ms, where other
// nodes' logs are in it, of which this node's stream says nothing. A `still` view is loaded once.
// `query(...names)` says what its stream follows, `moved(event)` gets each event, `leave()` is
// called when another view comes, and `kind` says what its first name names.
import { api, EventStream, forget } from "./api.js";
import { browse } from "./browse.js";
import { node, overview } from "./cluster.js";
import { make } from "./dom.js";
import { group, groups, reset } from "./groups.js";
import { life } from "./key.js";
import { missing } from "./missing.js";
import { partition } from "./partition.js";
import { produce } from "./produce.js";
import { records } from "./records.js";
import { settings } from "./settings.js";
import { topic } from "./topic.js";
import { create, topics } from "./topics.js";
import { transaction, transactions } from "./transactions.js";

const main = document.getElementById("view");
const trouble = document.getElementById("trouble");
const where = document.getElementById("where");
const status = document.getElementById("live");
const RETRY_MS = 3000;

const unknown = {
  still: true,
  load: async () => null,
  render: () => [
    make("h1", {}, "There is no such page"),
    make("p", {}, make("a", { href: "#" }, "The cluster")),
  ],
};
// Name: [view, view with a partition, section of the navigation].
const VIEWS = {
  "": [overview, overview, "cluster"],
  node: [node, node, "cluster"],
  topics: [topics, topics, "topics"],
  create: [create, create, "topics"],
  topic: [topic, partition, "topics"],
  records: [records, browse, "topics"],
  key: [life, life, "topics"],
  produce: [produce, produce, "topics"],
  settings: [settings, settings, "topics"],
  groups: [groups, groups, "groups"],
  group: [group, group, "groups"],
  reset: [reset, reset, "groups"],
  transactions: [transactions, transactions, "transactions"],
  transaction: [transaction, transaction, "transactions"],
};

let current = null; // the route that is shown
let turn = 0; // counts navigations: what was loaded for an earlier one is dropped
let there = false; // whether the view is shown: it was loaded
let retrying = false; // whether it is loaded again because it could not be
let shown = "";
let placeShown = "";
let timer = 0;
let poll = 0;
let busy = false;
let again = false;
let last = 0;
let said = "";
let refused = "";

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function route() {
  const [path, search] = location.hash.slice(1).split("?", 2);
  const [name, ...names] = path.split("/").map(decoded);
  const [whole, part, section] = VIEWS[name] || [unknown, unknown, ""];
  const query = new URLSearchParams(search || "");
  return { view: names.length > 1 ? part : whole, section, name, names, query };
}

function complain(message) {
  trouble.textContent = message || "";
  trouble.hidden = !message;
}

// What views may do.
const page = {
  refresh,

  go(hash) {
    if (hash === location.hash) navigate();
    else location.hash = hash;
  },

  // Do something at once, and say how it went for as long as the view stays.
  async act(path, body, done) {
    try {
      const { partitions } = await api(path, {}, body);
      const failed = (partitions || []).find((result) => result.error);
      refused = failed ? `Partition ${failed.partition}: ${failed.error}` : "";
      if (!refused) status.textContent = done;
    } catch (error) {
      refused = error.message;
    }
    complain(refused);
    forget();
    refresh();
  },
};

// One at a time; what moves meanwhile is loaded afterwards.
async function refresh() {
  clearTimeout(timer);
  timer = 0;
  if (busy) {
    again = true;
    return undefined;
  }
  busy = true;
  const mine = turn;
  const { view, names, query } = current;
  try {
    const loaded = await view.load(...names, query);
    if (mine === turn) {
      complain(refused);
      put(make("div", {}, view.render(loaded, page)));
      there = true;
      retrying = false;
    }
  } catch (error) {
    if (mine === turn) await failed(view, names, error);
  }
  last = Date.now();
  busy = false;
  if (mine === turn) main.removeAttribute("aria-busy");
  const missed = again;
  again = false;
  if (mine !== turn) return refresh();
  if (missed) soon();
  clearTimeout(poll);
  const wait = retrying ? RETRY_MS : current.view.poll;
  if (wait) {
    poll = setTimeout(() => {
      if (!document.hidden) soon();
    }, wait);
  }
  return undefined;
}

// Of a view that is there a failure is told, and it stays; another view does not stay in its place,
// and the one that is wanted is tried again until it is there, unless another try is of no use.
async function failed(view, names, error) {
  if (there && error.status !== 404) {
    complain(error.status === 0 ? `This node does not answer: ${error.message}` : error.message);
    return;
  }
  there = false;
  retrying = error.passing === true;
  complain("");
  put(make("div", {}, await missing(view, names[0], error)));
}

function soon() {
  const pause = current.view.pause || 1000;
  if (!timer) timer = setTimeout(refresh, Math.max(0, last + pause - Date.now()));
}

// Puts what a view made into the page where it differs. Of the same place it keeps focus, text that
// was typed, how far tables are scrolled, and what is unfolded.
function put(made) {
  if (made.outerHTML === shown) return; // read to compare, never written
  shown = made.outerHTML;
  const [place] = location.hash.split("?");
  if (place !== placeShown) main.replaceChildren();
  placeShown = place;
  const { id, hash, selectionStart } = document.activeElement;
  const typed = id && document.activeElement.value;
  const x = [...main.querySelectorAll(".scroll")].map((scroll) => scroll.scrollLeft);
  const unfolded = [...main.querySelectorAll("details[id][open]")].map((details) => details.id);
  main.replaceChildren(made);
  const head = main.querySelector("h1");
  document.title = head ? `${head.textContent} · kept` : "kept";
  [...main.querySelectorAll(".scroll")].forEach((scroll, i) => { scroll.scrollLeft = x[i] || 0; });
  for (const name of unfolded) {
    const details = document.getElementById(name);
    if (details) details.open = true;
  }
  const before = id
    ? document.getElementById(id)
    : hash && [...main.querySelectorAll("a")].find((anchor) => anchor.hash === hash);
  if (!before || !main.contains(before)) return;
  before.focus({ preventScroll: true });
  if (typed !== undefined && before.type === "search") {
    before.value = typed;
    before.setSelectionRange(selectionStart, selectionStart);
  }
}

const stream = new EventStream((event) => {
  const { view } = current;
  if (event && view.moved) view.moved(event);
  // How far a pass is moves its mark and nothing else.
  const text = event && JSON.stringify(event, (name, value) => name === "progress" ? undefined : value);
  if (text === null || text !== said) soon();
  said = text;
}, (open) => {
  status.classList.toggle("on", open);
  status.textContent = open ? "live" : "every 10 seconds";
});

function follow() {
  const { view, names } = current;
  if (view.still) {
    stream.stop();
    status.classList.remove("on");
    status.textContent = "as loaded";
  } else {
    stream.follow(view.query ? view.query(...names) : {});
  }
}

function navigate() {
  turn += 1;
  if (current && current.view.leave) current.view.leave();
  current = route();
  for (const anchor of document.querySelectorAll("nav [data-view]")) {
    if (anchor.dataset.view === current.section) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  last = 0;
  refused = "";
  shown = "";
  there = false;
  retrying = false;
  clearTimeout(timer);
  timer = 0;
  main.setAttribute("aria-busy", "true");
  follow();
  return refresh();
}

async function introduce() {
  try {
    const cluster = await api("cluster");
    where.textContent =
      `cluster ${cluster.cluster_id} as node ${cluster.node_id} sees it, kept ${cluster.version}`;
  } catch (error) {
    where.textContent = error.message;
  }
}

addEventListener("hashchange", () => {
  scrollTo(0, 0);
  // On the same page who types goes on typing.
  navigate().then(() => {
    if (!main.contains(document.activeElement)) main.focus({ preventScroll: true });
  });
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stream.stop();
  else if (!current.view.still || retrying) {
    follow();
    refresh();
  }
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
introduce();
navigate();
