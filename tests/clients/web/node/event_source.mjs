// Follows a native route with npm's EventSource until the server says that the run is over, or refuses.
// usage: node event_source.mjs URL [BEARER]  -> one line of JSON for each message and for each loss, then {"end": status}
import { EventSource } from "eventsource";

const [url, key] = process.argv.slice(2);
const tell = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);
const source = new EventSource(url, {
  fetch: (address, options) => fetch(address, { ...options, headers: { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) } }),
});
const timer = setTimeout(() => { tell({ end: "nothing more came" }); process.exit(1); }, 60_000);
source.onmessage = ({ lastEventId, data }) => tell({ id: lastEventId, data: JSON.parse(data) });
source.onerror = ({ code }) => {
  if (source.readyState !== EventSource.CLOSED) {
    tell({ lost: true });
    return;
  }
  clearTimeout(timer);
  tell({ end: code ?? null });
};
