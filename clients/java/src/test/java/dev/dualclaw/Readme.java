package dev.dualclaw;

import dev.dualclaw.v1.AttachRequest;
import dev.dualclaw.v1.Decision;
import dev.dualclaw.v1.DecisionAction;
import dev.dualclaw.v1.InterruptItem;
import dev.dualclaw.v1.ResumeRequest;
import io.grpc.Context;
import java.time.Duration;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;

/** The code of the README, so that the compiler reads it; {@link ReadmeTest} holds the two together. */
final class Readme {
  private Readme() {}

  static EngineClient patient() {
    EngineClient client = EngineClient.builder("127.0.0.1:50051")
        .reconnect(Reconnect.DEFAULT.withStart(Duration.ofSeconds(30)))
        .build();
    return client;
  }

  static void deadline(EngineClient client, RunView view, ScheduledExecutorService timer) {
    try (var limited = Context.current().withDeadlineAfter(2, TimeUnit.MINUTES, timer)) {
      limited.run(() -> client.ask("Hello").forEach(view::apply));
    }
  }

  static RunStream approval(EngineClient client, RunStream stream) {
    RunView view = new RunView();
    stream.forEach(view::apply);
    ResumeRequest.Builder answer = ResumeRequest.newBuilder().setRunId(stream.runId());
    for (InterruptItem item : view.interrupts()) {
      System.out.println(item.getPrompt() + " " + item.getToolName() + " " + item.getArgsJson());
      answer.addDecisions(Decision.newBuilder()
          .setInterruptId(item.getId())
          .setAction(DecisionAction.DECISION_ACTION_APPROVE)
          .setArgsHash(item.getArgsHash())); // approve what was shown, and nothing else
    }
    RunStream next = client.resume(answer.build());
    return next;
  }

  static RunStream later(EngineClient client, String runId, int lastSeq) {
    // In another process, or tomorrow: everything after what was seen, then what comes.
    RunStream stream = client.attach(
        AttachRequest.newBuilder().setRunId(runId).setAfterSeq(lastSeq).setWait(true).build());
    return stream;
  }

  static void errors(EngineClient client) {
    try {
      client.ask("Hello");
    } catch (EngineException refused) {
      switch (refused.reason()) {
        case "CONVERSATION_BUSY" -> System.out.println("run " + refused.metadata().get("run_id") + " is still at work");
        case "OVERLOADED" -> System.out.println("try again in " + refused.retryAfter());
        default -> throw refused;
      }
    }
  }
}
