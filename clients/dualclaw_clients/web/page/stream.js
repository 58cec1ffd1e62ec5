// Starts and follows runs over lost connections: every event reaches the page once and in order.
//
// Rules
// - A start carries a request_id, so a start whose answer was lost is sent again and gives the same run. So is one
//   that found no engine, for some seconds: engines are restarted.
// - The id of the last event is kept over all attempts; each attempt asks for what comes after it, and an event
//   with an id that was seen is dropped. So nothing is doubled and nothing is missing.
// - A response that ends without a terminal event, or stays silent beyond the server's heartbeats, was lost.
// - A parked run (an interrupt, then done) is followed further: somebody may answer in another channel.
// - A wish to stop outlives a broken line: it is sent as soon as the run is known and can be reached.

const SILENCE_MS = 45000;   // three heartbeats
const FIRST_DELAY_MS = 300;
const LONGEST_DELAY_MS = 5000;
const START_ATTEMPTS = 6;
const TRANSIENT = new Set([429, 502, 503, 504]);
const AWAY = new Set([502, 503, 504]);

let key = sessionStorage.getItem("dualclaw-key") || "";

export function hasKey() {
  return Boolean(key);
}

export function setKey(value) {
  key = value;
  sessionStorage.setItem("dualclaw-key", value);
}

export class Refusal extends Error {
  constructor(status, error) {
    super(error.message || `The gateway answered with status ${status}.`);
    this.status = status;
    this.reason = error.reason || "";
    this.hint = error.hint || "";
    this.engineIsAway = (error.metadata || {}).engine === "unreachable";
  }
}

function headers(extra) {
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

async function refusalOf(response) {
  const body = await response.json().catch(() => ({}));
  return new Refusal(response.status, body.error || {});
}

export async function call(method, path, body) {
  const response = await fetch(path, {
    method,
    headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }),
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw await refusalOf(response);
  return response.json();
}

// Answers one question of a run. The segment that follows is not read here: whoever follows the run sees it.
// Rejects with a Refusal that retrying cannot help, or with what broke the line too often.
export async function answer(runId, decision) {
  const body = JSON.stringify({ request_id: randomId(), decisions: [decision] });
  for (let attempt = 0; ; attempt += 1) {
    try {
      const response = await fetch(`/v1/runs/${encodeURIComponent(runId)}/resume`, {
        method: "POST", headers: headers({ "Content-Type": "application/json" }), body,
      });
      if (!response.ok) throw await refusalOf(response);
      response.body.cancel().catch(() => {});
      return;
    } catch (error) {
      if (attempt >= START_ATTEMPTS || (error instanceof Refusal && !TRANSIENT.has(error.status))) throw error;
    }
    await pause(Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** attempt), new AbortController().signal);
  }
}

// JSON whose big whole numbers stay what they are when they are shown, where the browser can keep them; a double
// would show other digits.
export function parseJson(text) {
  return JSON.parse(text, (_, value, context) => (
    JSON.rawJSON && typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context.source)
      ? JSON.rawJSON(context.source) : value
  ));
}

export function randomId() {
  // randomUUID needs a secure context, which plain http on a LAN is not.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class RunStream {
  // Give `request` (a RunRequest) to start a run, or `runId` to follow one from `lastId` on.
  constructor({ request = null, runId = "", lastId = 0, onEvent, onLink, onStart = () => {} }) {
    this.request = request;
    this.runId = runId;
    this.lastId = lastId;
    this.onEvent = onEvent;
    this.onLink = onLink;      // called with true while events can come, false while they cannot
    this.onStart = onStart;    // called once, when a start was accepted and the run has an id
    this.asking = false;       // the last event was an interrupt
    this.parked = false;       // the last event was the done after it
    this.ended = false;
    this.stopping = false;
    this.aborter = new AbortController();
  }

  close() {
    this.aborter.abort();
  }

  // Asks the run to end; its events tell when it has. Rejects with a Refusal that retrying cannot help.
  async stop() {
    this.stopping = true;
    if (!this.runId) return;
    try {
      await call("POST", `/v1/runs/${encodeURIComponent(this.runId)}/cancel`, { reason: "stopped on the page" });
    } catch (error) {
      if (error instanceof Refusal && !TRANSIENT.has(error.status)) throw error;
    }
  }

  // Resolves when the run is over or the stream was closed; rejects with a Refusal that retrying cannot help.
  async read() {
    const { signal } = this.aborter;
    let attempt = 0;
    while (!signal.aborted) {
      const before = this.lastId;
      try {
        const response = await this.connect(signal);
        if (response.status === 204) return;
        this.onLink(true);
        if (this.stopping) this.stop().catch(() => {});   // refused: it is over, or its events go on
        await this.consume(response, signal);
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refusal && !(this.runId ? TRANSIENT : AWAY).has(error.status)) throw error;
        if (!this.runId && attempt >= START_ATTEMPTS) throw error;
      }
      if (this.ended || signal.aborted) return;
      const progress = this.lastId > before;
      if (progress) attempt = 0;
      if (progress && this.parked) continue;   // a segment ended as it should; wait for the next one
      this.onLink(false);
      await pause(Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** attempt) * (0.7 + Math.random() * 0.6), signal);
      attempt += 1;
    }
  }

  async connect(signal) {
    const response = this.runId
      ? await fetch(`/v1/runs/${encodeURIComponent(this.runId)}/events`, {
        headers: headers(this.lastId ? { "Last-Event-ID": String(this.lastId) } : {}),
        cache: "no-store",
        signal,
      })
      : await fetch("/v1/runs", {
        method: "POST",
        headers: headers({ "Content-Type": "application/json" }),
        body: JSON.stringify(this.request),
        signal,
      });
    if (!response.ok) throw await refusalOf(response);
    const known = this.runId;
    this.runId = response.headers.get("X-Run-Id") || known;
    if (this.runId && !known) this.onStart();
    return response;
  }

  async consume(response, signal) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let silent;
    const wake = () => {
      clearTimeout(silent);
      silent = setTimeout(() => reader.cancel().catch(() => {}), SILENCE_MS);
    };
    wake();
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done || signal.aborted) return;
        wake();
        const frames = (rest + value).split("\n\n");
        rest = frames.pop();
        for (const frame of frames) {
          this.take(frame);
          if (this.ended) return;
        }
      }
    } finally {
      clearTimeout(silent);
      reader.cancel().catch(() => {});
    }
  }

  take(frame) {
    let id = 0;
    const data = [];
    for (const line of frame.split("\n")) {
      if (line.startsWith("id:")) id = parseInt(line.slice(3), 10) || 0;
      else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    }
    if (!data.length || (id && id <= this.lastId)) return;
    const event = parseJson(data.join("\n"));
    if (id) this.lastId = id;
    this.parked = event.type === "done" && this.asking;
    this.asking = event.type === "interrupt";
    if (event.type === "error" || (event.type === "done" && !this.parked)) this.ended = true;
    this.onEvent(event);
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const finish = () => {
      clearTimeout(timer);
      window.removeEventListener("online", finish);
      signal.removeEventListener("abort", finish);
      resolve();
    };
    const timer = setTimeout(finish, milliseconds);
    window.addEventListener("online", finish);
    signal.addEventListener("abort", finish);
  });
}
