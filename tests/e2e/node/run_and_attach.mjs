// Runs an agent with nothing but the .proto files, then attaches at several places.
// usage: node run_and_attach.mjs TARGET PROTO_ROOT QUESTION  -> one line of JSON on stdout
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [target, root, question] = process.argv.slice(2);
const definition = loader.loadSync("dualclaw/v1/engine_service.proto", {
  includeDirs: [root],
  keepCase: true,
  enums: String,
  oneofs: true,
});
const { EngineService } = grpc.loadPackageDefinition(definition).dualclaw.v1;
const client = new EngineService(target, grpc.credentials.createInsecure());
const deadline = () => ({ deadline: Date.now() + 30_000 });

const collect = (call) =>
  new Promise((resolve, reject) => {
    const events = [];
    call.on("data", (message) => events.push(...message.events));
    call.on("error", reject);
    call.on("end", () => resolve(events));
  });

const message = { role: "ROLE_USER", parts: [{ text: question }] };
const events = await collect(client.Run({ message, claw: "node" }, deadline()));
const run_id = events[0].run_id;
const last = events.at(-1).seq;
const attached = {};
for (const after_seq of [0, 1, Math.floor(last / 2), last - 1, last]) {
  attached[after_seq] = await collect(client.Attach({ run_id, after_seq }, deadline()));
}
const refused = await collect(client.Attach({ run_id, after_seq: last + 1 }, deadline())).catch((error) => error.code);
process.stdout.write(JSON.stringify({ events, attached, refused }) + "\n");
client.close();
