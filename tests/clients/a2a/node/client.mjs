// The JavaScript SDK's client on one binding: `node client.mjs URL JSONRPC|GRPC` plays every scenario and prints a
// line of JSON for each.
import { randomUUID } from 'node:crypto';
import { AgentCardResolver, ClientFactory, ClientFactoryOptions, JsonRpcTransportFactory } from '@a2a-js/sdk/client';
import { GrpcTransportFactory } from '@a2a-js/sdk/client/grpc';
import { TaskState } from '@a2a-js/sdk';

const [url, binding] = process.argv.slice(2);
const factory = new ClientFactory({
  ...ClientFactoryOptions.default,
  transports: [binding === 'GRPC' ? new GrpcTransportFactory() : new JsonRpcTransportFactory()],
  preferredTransports: [binding],
});
const client = await factory.createFromAgentCard(await AgentCardResolver.default.resolve(url));

function request(text, where = {}) {
  return {
    tenant: '',
    metadata: undefined,
    configuration: undefined,
    message: {
      messageId: randomUUID(), contextId: '', taskId: '', role: 1, metadata: undefined, extensions: [],
      referenceTaskIds: [], ...where,
      parts: [{ content: { $case: 'text', value: text }, metadata: undefined, filename: '', mediaType: '' }],
    },
  };
}

const textOf = (parts) => parts.map((part) => (part.content?.$case === 'text' ? part.content.value : '')).join('');

async function collect(stream, until = () => false) {
  const seen = { id: '', kinds: [], states: [], artifacts: {}, status: '' };
  const takeStatus = (status) => {
    seen.states.push(TaskState[status.state].replace('TASK_STATE_', ''));
    if (status.message) seen.status = textOf(status.message.parts);
  };
  for await (const { payload } of stream) {
    seen.kinds.push(payload.$case);
    const value = payload.value;
    if (payload.$case === 'task') {
      seen.id = value.id;
      for (const artifact of value.artifacts) seen.artifacts[artifact.artifactId] = textOf(artifact.parts);
      takeStatus(value.status);
    } else if (payload.$case === 'statusUpdate') {
      takeStatus(value.status);
    } else if (payload.$case === 'artifactUpdate') {
      const { artifactId, parts } = value.artifact;
      seen.artifacts[artifactId] = (value.append ? seen.artifacts[artifactId] : '') + textOf(parts);
    }
    if (until(seen)) break;
  }
  return seen;
}

const say = (name, seen) => console.log(JSON.stringify({ name, ...seen }));
const last = (seen) => Object.values(seen.artifacts).at(-1) ?? '';

say('text', await collect(client.sendMessageStream(request('conformance: text'))));
say('rewind', await collect(client.sendMessageStream(request('conformance: rewind'))));

const asked = await collect(client.sendMessageStream(request('conformance: approval')));
say('asked', asked);
say('unclear', await collect(client.sendMessageStream(request('maybe', { taskId: asked.id }))));
say('approved', await collect(client.sendMessageStream(request('approve pay-a', { taskId: asked.id }))));

// The stream is cut by its reader, taken up again, and the task is cancelled while it is followed.
const part = await collect(client.sendMessageStream(request('conformance: slow')), (seen) => last(seen).includes('003 '));
let cancelling;
const rest = await collect(
  client.resubscribeTask({ tenant: '', id: part.id }),
  (seen) => {
    if (last(seen).includes('009 ')) cancelling ??= client.cancelTask({ tenant: '', id: part.id, metadata: undefined });
    return false;
  },
);
const cancelled = await cancelling;
say('part', part);
say('rest', rest);
say('cancelled', { state: TaskState[cancelled.status.state], text: textOf(cancelled.artifacts[0].parts) });
const task = await client.getTask({ tenant: '', id: asked.id, historyLength: undefined });
say('got', { state: TaskState[task.status.state], artifacts: task.artifacts.map((a) => textOf(a.parts)) });
const missing = await client.getTask({ tenant: '', id: 'nothing', historyLength: undefined }).catch((error) => error);
say('missing', { error: missing.constructor.name });
process.exit(0);
