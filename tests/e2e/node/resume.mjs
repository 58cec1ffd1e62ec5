// Runs an agent that asks, and answers it, with nothing but the .proto files: other arguments for the first call of
// the interrupt, approval for the rest. Then repeats the answer under its request_id, and gives another one.
// usage: node resume.mjs TARGET PROTO_ROOT QUESTION ARGS_JSON  -> one line of JSON on stdout
import { codeOf, collect, connect, deadline } from "./engine.mjs";

const [target, root, question, args_json] = process.argv.slice(2);
const client = connect(target, root);
const message = { role: "ROLE_USER", parts: [{ text: question }] };
const first = await collect(client.Run({ message, claw: "node" }, deadline()));
const run_id = first[0].run_id;
const { items } = first.at(-2).interrupt;
const decisions = items.map(({ id, args_hash }, place) => ({
  interrupt_id: id,
  args_hash,
  ...(place ? { action: "DECISION_ACTION_APPROVE" } : { action: "DECISION_ACTION_EDIT", args_json }),
}));
const answer = (request_id) => client.Resume({ run_id, request_id, decisions }, deadline());
const second = await collect(answer("mine"));
const again = await collect(answer("mine"));
const attached = await collect(client.Attach({ run_id, after_seq: 0 }, deadline()));
const late = await codeOf(answer("other"));
process.stdout.write(JSON.stringify({ first, second, again, attached, late }) + "\n");
client.close();
