// Runs an agent with nothing but the .proto files, then attaches at several places.
// usage: node run_and_attach.mjs TARGET PROTO_ROOT QUESTION  -> one line of JSON on stdout
import { codeOf, collect, connect, deadline } from "./engine.mjs";

const [target, root, question] = process.argv.slice(2);
const client = connect(target, root);
const message = { role: "ROLE_USER", parts: [{ text: question }] };
const events = await collect(client.Run({ message, claw: "node" }, deadline()));
const run_id = events[0].run_id;
const last = events.at(-1).seq;
const attached = {};
for (const after_seq of [0, 1, Math.floor(last / 2), last - 1, last]) {
  attached[after_seq] = await collect(client.Attach({ run_id, after_seq }, deadline()));
}
const refused = await codeOf(client.Attach({ run_id, after_seq: last + 1 }, deadline()));
process.stdout.write(JSON.stringify({ events, attached, refused }) + "\n");
client.close();
