// Which view is shown, and when it is asked for again.
import { api, Live } from "./ask.js";
import { group, groups, overview, topics, transaction, transactions } from "./cluster.js";
import { make } from "./dom.js";
import { life, records } from "./records.js";
import { partition, topic } from "./topic.js";

const view = document.getElementById("view"), trouble = document.getElementById("trouble");
const where = document.getElementById("where"), status = document.getElementById("live");
const VIEWS = { "": [overview, "cluster", "Cluster"], topics: [topics, "topics", "Topics"], topic: [topic, "topics"], groups: [groups, "groups", "Groups"], group: [group, "groups"], transactions: [transactions, "transactions", "Transactions"], transaction: [transaction, "transactions"], records: [records, "topics"], key: [life, "topics"] };
let shown = "", turn = 0, timer = 0, poll = 0, busy = false, again = false, last = 0, said = "", refused = "";

function decoded(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

function wanted() {
  const [path, search] = location.hash.slice(1).split("?", 2);
  const [kind, ...names] = path.split("/").map(decoded);
  const [found, section, title] = kind === "topic" && names.length > 1 ? [partition, "topics"] : VIEWS[kind] || VIEWS[""];
  return { found, section, title: title || names.join(" "), names, query: new URLSearchParams(search || "") };
}

function complain(message) {
  trouble.textContent = message || "";
  trouble.hidden = !message;
}

async function act(path, body, done) {
  try {
    const { partitions } = await api(path, {}, body), failed = (partitions || []).find((one) => one.error);
    refused = failed ? `Partition ${failed.partition}: ${failed.error}` : "";
    if (!refused) status.textContent = done;
  } catch (error) { refused = error.message; }
  complain(refused); // for as long as the view stays, or until a button does better
  refresh();
}

function go(hash) {
  if (hash === null || hash === location.hash) { shown = ""; refresh(); } else location.hash = hash;
}

// One at a time; what moves meanwhile is asked for afterwards.
async function refresh() {
  clearTimeout(timer);
  timer = 0;
  if (busy) { again = true; return; }
  busy = true;
  const mine = turn;
  try {
    const { found, names, query } = wanted();
    const value = await found.ask(...names, query);
    if (mine === turn) {
      complain(refused);
      put(make("div", {}, found.show(value, refresh, act, go)));
    }
  } catch (error) {
    if (mine === turn) complain(error instanceof TypeError ? `This node does not answer: ${error.message}` : error.message);
  }
  last = Date.now();
  busy = false;
  if (mine === turn) view.removeAttribute("aria-busy");
  if (again || mine !== turn) { again = false; soon(); }
  // This node's stream does not tell what moves on others.
  const { found } = wanted();
  clearTimeout(poll);
  if (found.poll) poll = setTimeout(() => { if (!document.hidden) soon(); }, found.poll);
}

function soon() {
  const { found } = wanted();
  if (!timer) timer = setTimeout(refresh, Math.max(0, last + (found.pause || 1000) - Date.now()));
}

function put(made) {
  if (made.outerHTML === shown) return; // read to compare, never written
  shown = made.outerHTML;
  const { id, hash, selectionStart } = document.activeElement, typed = id && document.activeElement.value;
  const x = [...view.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  view.replaceChildren(made);
  [...view.querySelectorAll(".scroll")].forEach((one, i) => { one.scrollLeft = x[i] || 0; });
  const before = id ? document.getElementById(id) : hash && [...view.querySelectorAll("a")].find((one) => one.hash === hash);
  if (!before || !view.contains(before)) return;
  before.focus({ preventScroll: true });
  if (typed !== undefined && before.type === "search") {
    before.value = typed;
    before.setSelectionRange(selectionStart, selectionStart);
  }
}

const live = new Live((event) => {
  const { found } = wanted();
  if (event && found.moved) found.moved(event);
  // How far a pass is moves its mark and nothing else.
  const text = event && JSON.stringify(event, (name, value) => name === "progress" ? undefined : value);
  if (!found.still && (text === null || text !== said)) soon();
  said = text;
}, (open) => {
  status.classList.toggle("on", open);
  status.textContent = open ? "live" : "asks from time to time";
});

function navigate() {
  turn += 1;
  const { found, section, title, names } = wanted();
  document.title = title ? `${title} · kept` : "kept";
  for (const one of document.querySelectorAll("nav [data-view]")) {
    if (one.dataset.view === section) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  }
  last = 0;
  refused = "";
  clearTimeout(timer);
  timer = 0;
  view.setAttribute("aria-busy", "true");
  live.follow(found.query ? found.query(...names) : {});
  return refresh();
}

async function introduce() {
  try {
    const cluster = await api("cluster");
    where.textContent = `cluster ${cluster.cluster_id} as node ${cluster.node_id} sees it, kept ${cluster.version}`;
  } catch (error) { complain(`This node does not answer as it should: ${error.message}`); }
}

addEventListener("hashchange", () => { scrollTo(0, 0); navigate().then(() => view.focus({ preventScroll: true })); });
document.addEventListener("visibilitychange", () => { if (document.hidden) live.stop(); else navigate(); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); view.focus(); });
introduce();
navigate();
