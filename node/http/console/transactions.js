// Transactional ids, and one of them.
import { api } from "./api.js";
import { first, kept } from "./command.js";
import { count, crumbs, facts, hash, link, make, moment, quiet, table } from "./dom.js";
import { listed, nameFilter, unanswered } from "./groups.js";

let filter = "";

export const transactions = {
  pause: 5000,
  poll: 10000,
  load: () => api("transactions", { name: filter }),
  render(found, page) {
    const rows = found.transactions.map((one) => [
      link(hash("transaction", one.transactional_id), one.transactional_id),
      one.state,
      String(one.producer_id),
      `node ${one.coordinator}`,
    ]);
    return [
      make("h1", {}, "Transactions"),
      nameFilter(page, filter, (name) => { filter = name; }),
      rows.length || filter
        ? table("Transactional ids", ["Transactional id", "State", ["Producer id", "number"], "Coordinator"], rows)
        : first("There is no transactional id yet. This writes its input in one transaction:",
          kept(["produce"], "orders", [["--transactional-id", "nightly"]])),
      rows.length || filter ? listed(found, found.transactions, "transactional id") : "",
      unanswered(found.unanswered),
    ];
  },
};

export const transaction = {
  kind: "transaction",
  pause: 3000,
  poll: 5000,
  load: (name) => api("transactions/" + encodeURIComponent(name)),
  render(found) {
    const rows = found.partitions.map((one) => [
      link(hash("topic", one.topic, one.partition), one.topic), one.partition,
    ]);
    return [
      crumbs(link("#transactions", "Transactions")),
      make("h1", {}, found.transactional_id),
      facts([
        ["State", found.state],
        ["Started", moment(found.started_ms)],
        ["Timeout", `${count(found.timeout_ms / 1000)} s`],
        ["Producer id", String(found.producer_id)],
        ["Producer epoch", String(found.producer_epoch)],
        ["Coordinator", `node ${found.coordinator}`],
      ]),
      rows.length
        ? table("Partitions of the transaction", ["Topic", ["Partition", "number"]], rows)
        : quiet("No partition is in a transaction of it now."),
    ];
  },
};
