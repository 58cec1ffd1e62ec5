// The code of the README, so that the compiler reads it; `readme.test.ts` holds the two together.
import { EngineClient } from "dualclaw";
import { RunView } from "dualclaw";
import { EngineError } from "dualclaw";
import { DecisionAction } from "dualclaw/v1";

export async function readme(runId: string, lastSeq: number): Promise<unknown> {
  const client = new EngineClient("127.0.0.1:50051");
  const stream = await client.ask("What is 17 * 23?");
  for await (const event of stream) {
    if (event.payload.case === "delta") process.stdout.write(event.payload.value.content);
  }

  const asking = await client.ask("Pay 5 to Ann.");
  const view = new RunView();
  for await (const event of asking) view.apply(event);
  const decisions = view.interrupts.map((item) => {
    console.log(item.prompt, item.toolName, item.argsJson);
    // With its hash, what was shown is approved and nothing else.
    return { interruptId: item.id, action: DecisionAction.APPROVE, argsHash: item.argsHash };
  });
  const next = await client.resume({ runId: asking.runId, decisions });

  // In another process, or tomorrow: everything after what was seen, then what comes.
  const later = await client.attach({ runId, afterSeq: lastSeq, wait: true });

  try {
    await client.ask("Hello");
  } catch (error) {
    if (error instanceof EngineError && error.reason === "CONVERSATION_BUSY") {
      console.log(`run ${error.metadata["run_id"]} is still at work`);
    } else throw error;
  }
  return [next, later];
}
