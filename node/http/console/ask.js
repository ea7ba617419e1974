// What the page asks of its node, and of no other: node=N has another one answer through it.
export async function api(path, query = {}, body = null) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const address = "/api/v1/" + path + (given.length ? "?" + new URLSearchParams(given) : "");
  const how = body === null ? { cache: "no-store" } : { method: "POST", headers: { "X-Kept": "console", "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(address, how);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error ? value.error.message : answer.statusText);
  return value;
}

// The stream of events, or asking from time to time where there is none. `moved(event)` is called
// with null when nothing is known but that time has passed.
const ASK_MS = 10000;
const AGAIN_MS = 30000;

export class Live {
  constructor(moved, told) {
    this.moved = moved;
    this.told = told;
    this.query = null;
  }

  follow(query) {
    const wanted = new URLSearchParams(query).toString();
    if (wanted === this.query && this.source) return;
    this.stop();
    this.query = wanted;
    const source = this.source = new EventSource("/api/v1/events" + (wanted ? "?" + wanted : ""));
    source.onopen = () => { this.calm(); this.told(true); };
    source.onmessage = (event) => this.moved(JSON.parse(event.data));
    source.onerror = () => {
      this.told(false);
      if (!this.asking) this.asking = setInterval(() => this.moved(null), ASK_MS);
      if (source.readyState === EventSource.CLOSED && !this.again) {
        this.again = setTimeout(() => { const query = this.query; this.source = null; this.again = 0; this.follow(query); }, AGAIN_MS);
      }
    };
  }

  calm() {
    clearInterval(this.asking);
    clearTimeout(this.again);
    this.asking = this.again = 0;
  }

  stop() {
    this.calm();
    if (this.source) this.source.close();
    this.source = null;
  }
}
