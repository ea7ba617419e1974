// Consumer groups, one of them, and a form that resets its offsets.
import { actionForm, allowed, offNote } from "./actions.js";
import { api, recent } from "./api.js";
import { chart, nowAfter } from "./charts.js";
import { first, kept } from "./command.js";
import {
  button, count, crumbs, facts, form, hash, input, label, link, make, plural, quiet, select, table,
  tick,
} from "./dom.js";

const SAMPLED_MS = 15000;
let filter = "";
let internal = false;

export const unanswered = (list) =>
  list.map((one) => make("p", { class: "bad" }, `Node ${one.node} does not answer: ${one.reason}`));

// The lag of a group, in one way everywhere: how many partitions it does not count is said.
export function lagOf(group) {
  const unknown = group.partitions_unknown;
  const text = count(group.lag);
  return unknown ? `${text} (${plural(unknown, "partition")} unknown)` : text;
}

// A filter for what the node lists: it leaves out what would be too long.
export function nameFilter(page, chosen, change, ...others) {
  const box = input("filter", chosen, { type: "search", placeholder: "part of a name" });
  const submit = () => {
    change(box.value);
    page.refresh();
  };
  box.addEventListener("change", submit);
  const apply = make("button", { class: "main" }, "Filter");
  return form("Filter", [label("Filter by name", box), ...others, apply], submit);
}

export const listed = (found, rows, what) =>
  quiet(found.left_out ? `${count(found.left_out)} more: filter by name` : plural(rows.length, what));

export const groups = {
  pause: 5000,
  poll: 10000,
  load: () => api("groups", { name: filter }),
  render(found, page) {
    // As in `kept group list`: names that begin so are of tools of the cluster.
    const shown = found.groups.filter((group) => internal || !group.group.startsWith("__"));
    const rows = shown.map((group) => [
      link(hash("group", group.group), group.group),
      group.state,
      count(group.members),
      lagOf(group),
      `node ${group.coordinator}`,
      group.topics.join(", ") || "–",
    ]);
    const any = rows.length || filter || internal || found.left_out;
    const more = tick("internal", "internal groups too", internal, (ticked) => {
      internal = ticked;
      page.refresh();
    });
    return [
      make("h1", {}, "Consumer groups"),
      nameFilter(page, filter, (name) => { filter = name; }, more),
      any
        ? table("Consumer groups", ["Group", "State", ["Members", "number"], ["Lag", "number"], "Coordinator", "Topics"], rows)
        : first("There is no consumer group yet. This makes one that reads a topic:",
          kept(["consume"], "orders", [["--group", "readers"]])),
      any ? listed(found, rows, "group") : "",
      unanswered(found.unanswered),
    ];
  },
};

function members(found) {
  if (!found.members.length) return quiet("No members now.");
  const assigned = (id) => found.partitions.filter((one) => one.member_id === id).length;
  return table("Members", ["Consumer", "Client", "Host", "Instance", ["Partitions", "number"]],
    found.members.map((one) => [one.member_id, one.client_id, one.host, one.instance_id || "–", assigned(one.member_id)]));
}

export const group = {
  kind: "group",
  pause: 3000,
  poll: 5000,
  async load(name) {
    return Promise.all([
      api("groups/" + encodeURIComponent(name)),
      recent("history/lag", { group: name }, SAMPLED_MS).catch(() => null),
    ]);
  },
  render([found, history]) {
    const samples = history
      ? [...history.samples, { at_ms: nowAfter(history.samples), lag: found.lag }] : [];
    const clients = new Map(found.members.map((member) => [member.member_id, member]));
    const rows = found.partitions.map((one) => {
      const member = clients.get(one.member_id);
      return [
        link(hash("topic", one.topic, one.partition), `${one.topic}:${one.partition}`),
        count(one.committed_offset),
        count(one.high_watermark),
        count(one.lag),
        one.member_id || "–",
        member ? member.client_id : "–",
        member ? member.host : "–",
      ];
    });
    return [
      crumbs(link("#groups", "Groups")),
      make("h1", {}, found.group),
      facts([
        ["State", found.state],
        ["Assignor", found.protocol || "–"],
        ["Coordinator", `node ${found.coordinator}`],
        ["Members", count(found.members.length)],
        ["Lag", lagOf(found)],
      ]),
      make("div", { class: "row" }, button(hash("reset", found.group), "Reset offsets")),
      history ? make("h2", {}, "Last hour") : "",
      history
        ? make("div", { class: "charts" }, chart("lag", "Lag", samples, "lag", { interval: history.interval_ms }))
        : "",
      make("h2", {}, "Partitions"),
      table("Partitions of the group", [
        "Partition", ["Committed offset", "number"], ["High watermark", "number"], ["Lag", "number"],
        "Consumer", "Client", "Host",
      ], rows),
      make("h2", {}, "Members"),
      members(found),
      unanswered(found.unanswered),
    ];
  },
};

const TARGETS = [
  ["earliest", "earliest: the log start"], ["latest", "latest: the high watermark"],
  ["offset", "an offset"], ["time", "a time"],
];

const localTime = (text) => new Date(text).getTime();

function moved(partitions) {
  const sorted = [...partitions].sort((a, b) => a.partition - b.partition);
  const rows = sorted.map((one) => {
    const by = one.before === null ? "–" : count(one.after - one.before);
    return [`${one.topic}:${one.partition}`, count(one.before), count(one.after), by];
  });
  return table("Offsets before and after",
    ["Partition", ["Committed now", "number"], ["Committed then", "number"], ["Moved by", "number"]], rows);
}

export const reset = {
  kind: "group",
  still: true,
  async load(name) {
    return Promise.all([api("groups/" + encodeURIComponent(name)), allowed()]);
  },
  render([found, actions]) {
    const topics = [...new Set(found.partitions.map((one) => one.topic))];
    const topic = topics.length
      ? select("topic", topics.map((name) => [name, name]), topics[0])
      : input("topic", "", { required: true });
    const partition = input("partition", "", { type: "number", min: 0, placeholder: "all" });
    const to = select("to", TARGETS, "earliest");
    const offset = input("offset", "", { type: "number", min: 0 });
    const time = input("time", "", { type: "datetime-local", step: 1 });
    const offsetLabel = label("Offset", offset);
    const timeLabel = label("Time, here", time);
    const preview = make("div", { "aria-live": "polite" });
    let dry = false;
    const adapt = () => {
      offsetLabel.hidden = to.value !== "offset";
      timeLabel.hidden = to.value !== "time";
    };
    adapt();
    const target = () => {
      if (to.value === "offset") return offset.value || "OFFSET";
      if (to.value === "time") return time.value ? new Date(localTime(time.value)).toISOString() : "TIMESTAMP";
      return to.value;
    };
    const body = (only) => ({
      group: found.group,
      topic: topic.value,
      ...(partition.value === "" ? {} : { partition: Number(partition.value) }),
      ...(to.value === "offset" ? { offset: Number(offset.value) } : {}),
      ...(to.value === "time" ? { timestamp: localTime(time.value) } : {}),
      ...(to.value === "earliest" || to.value === "latest" ? { to: to.value } : {}),
      dry_run: only,
    });
    const look = make("button", {
      type: "button", id: "dry-run", disabled: !actions, "aria-describedby": actions ? null : "about-buttons",
      onclick: async () => {
        try {
          const result = await api("groups/reset-offsets", {}, body(true));
          dry = !result.error;
          preview.replaceChildren(result.error
            ? make("p", { class: "bad" }, result.error)
            : moved(result.partitions));
        } catch (error) {
          preview.replaceChildren(make("p", { class: "bad" }, error.message));
        }
        section.adapt();
      },
    }, "Show the dry run");
    const section = actionForm({
      id: "reset",
      fields: [label("Topic", topic), label("Partition", partition), label("To", to), offsetLabel, timeLabel, look],
      preview,
      submit: "Reset offsets",
      typed: found.group,
      command: () => kept(["group", "reset-offsets"], found.group, [
        ["--topic", `${topic.value || "TOPIC"}${partition.value === "" ? "" : `:${partition.value}`}`], ["--to", target()],
      ]),
      ready: () => dry,
      changed: () => {
        dry = false;
        preview.replaceChildren();
        adapt();
      },
      send: () => api("groups/reset-offsets", {}, body(false)),
      done: (result) => {
        preview.replaceChildren(moved(result.partitions));
        dry = false;
        return ["The offsets are committed. ", link(hash("group", found.group), "The group")];
      },
    }, actions);
    return [
      crumbs(link("#groups", "Groups"), link(hash("group", found.group), found.group)),
      make("h1", {}, "Reset offsets"),
      quiet("The group must have no members. First the dry run shows what would be committed."),
      found.members.length ? make("p", { class: "bad" }, `It has ${plural(found.members.length, "member")} now.`) : "",
      offNote(actions),
      section,
    ];
  },
};
