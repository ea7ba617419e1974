// What the page requests of its node, and of no other: node=N has another one answer through it.

// `status` is that of HTTP, 0 where no answer came. `passing`: another try may come to something.
class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
    this.passing = status === 0 || status >= 500;
  }
}

export function search(query) {
  const given = Object.entries(query).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  return given.length ? "?" + new URLSearchParams(given) : "";
}

export async function api(path, query = {}, body = null) {
  const options = body === null ? { cache: "no-store" } : {
    method: "POST",
    headers: { "X-Kept": "console", "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  try {
    const response = await fetch("/api/v1/" + path + search(query), options);
    if (response.ok) return await response.json();
    throw await refusal(response);
  } catch (error) {
    throw error instanceof ApiError ? error : new ApiError(error.message, 0);
  }
}

// What an answer says is wrong; one of a proxy is no JSON.
async function refusal(response) {
  const value = await response.json().catch(() => null);
  const said = value && value.error && value.error.message;
  return new ApiError(said || response.statusText || `HTTP status ${response.status}`, response.status);
}

// The same, requested again only when the last answer is older than `maxAgeMs`.
const RECENT = 20;
const answers = new Map();

export function recent(path, query, maxAgeMs) {
  const address = path + search(query);
  const known = answers.get(address);
  if (known && Date.now() - known.at < maxAgeMs) return known.answer;
  const answer = api(path, query);
  answers.delete(address);
  answers.set(address, { at: Date.now(), answer });
  answer.catch(() => answers.delete(address));
  if (answers.size > RECENT) answers.delete(answers.keys().next().value);
  return answer;
}

export const forget = () => answers.clear();

// The stream of events, or polling where there is none. `moved(event)` is called with null when
// nothing is known but that time has passed.
const POLL_MS = 10000;
const RECONNECT_MS = 30000;

export class EventStream {
  constructor(moved, connected) {
    this.moved = moved;
    this.connected = connected;
    this.query = null;
  }

  follow(query) {
    const wanted = search(query);
    if (wanted === this.query && this.source) return;
    this.stop();
    this.query = wanted;
    const source = this.source = new EventSource("/api/v1/events" + wanted);
    source.onopen = () => {
      this.clearTimers();
      this.connected(true);
    };
    source.onmessage = (event) => {
      const told = JSON.parse(event.data);
      this.moved(told);
      // Who may not describe the cluster is not told how many records come: he looks himself.
      if (told.records_in === undefined) this.poll();
    };
    source.onerror = () => {
      this.connected(false);
      this.poll();
      if (source.readyState === EventSource.CLOSED && !this.reconnect) {
        this.reconnect = setTimeout(() => {
          this.source = null;
          this.reconnect = 0;
          this.follow(query);
        }, RECONNECT_MS);
      }
    };
  }

  poll() {
    if (!this.polling) this.polling = setInterval(() => this.moved(null), POLL_MS);
  }

  clearTimers() {
    clearInterval(this.polling);
    clearTimeout(this.reconnect);
    this.polling = this.reconnect = 0;
  }

  stop() {
    this.clearTimers();
    if (this.source) this.source.close();
    this.source = null;
  }
}
