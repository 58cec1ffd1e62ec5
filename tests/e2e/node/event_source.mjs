// Follows a run's native route with the EventSource client until the server answers 204.
// usage: node event_source.mjs URL  -> one line of JSON on stdout
import { EventSource } from "eventsource";

const events = [];
const source = new EventSource(process.argv[2]);
const timer = setTimeout(() => finish(1), 90_000);
const finish = (code) => {
  clearTimeout(timer);
  source.close();
  process.stdout.write(JSON.stringify(events) + "\n");
  process.exitCode = code;
};
source.onmessage = ({ lastEventId, data }) => events.push({ id: lastEventId, data: JSON.parse(data) });
source.onerror = ({ code }) => {
  if (code === 204 || source.readyState === EventSource.CLOSED) finish(code === 204 ? 0 : 1);
};
