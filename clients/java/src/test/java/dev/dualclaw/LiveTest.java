package dev.dualclaw;

import static dev.dualclaw.Fold.checkRules;
import static dev.dualclaw.Fold.collect;
import static dev.dualclaw.Fold.view;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.dualclaw.v1.AttachRequest;
import dev.dualclaw.v1.Decision;
import dev.dualclaw.v1.DecisionAction;
import dev.dualclaw.v1.EngineEvent;
import dev.dualclaw.v1.InterruptItem;
import dev.dualclaw.v1.ListRunsRequest;
import dev.dualclaw.v1.ResumeRequest;
import dev.dualclaw.v1.Run;
import dev.dualclaw.v1.RunRequest;
import dev.dualclaw.v1.StopReason;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executors;
import java.util.concurrent.Flow;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/**
 * Tests that speak to the agent "conformance" of a real engine; tests/clients/languages of the repository starts it and
 * sets DUALCLAW_ENGINE and DUALCLAW_CONTROL.
 */
@EnabledIfEnvironmentVariable(named = "DUALCLAW_ENGINE", matches = ".+")
@Timeout(value = 300, unit = TimeUnit.SECONDS)
class LiveTest {
  private EngineClient client;

  @BeforeEach
  void connect() {
    client = EngineClient.connect(System.getenv("DUALCLAW_ENGINE"));
  }

  @AfterEach
  void close() {
    client.close();
  }

  private static RunRequest scenario(String name) {
    return RunRequest.newBuilder().setAgent("conformance").setClaw("test")
        .setMessage(EngineClient.userMessage("conformance: " + name)).build();
  }

  private static void assertRefused(String reason, Runnable call) {
    assertEquals(reason, assertThrows(EngineException.class, call::run).reason());
  }

  @ParameterizedTest
  @CsvSource({"text,Hello 你好 🙂", "tool,Two of three went well.", "args,Seen.", "rewind,This is right.",
      "loop,That was enough."})
  void scenarios(String name, String text) {
    List<EngineEvent> events = collect(client.run(scenario(name)));
    checkRules(events);
    assertEquals(text, view(events).text());
  }

  @Test
  void argumentsKeepEveryDigit() {
    EngineEvent step = collect(client.run(scenario("args"))).stream().filter(EngineEvent::hasStep).findFirst()
        .orElseThrow();
    String wire = Wire.toWire(step).orElseThrow();
    assertTrue(wire.contains("\"args\": " + step.getStep().getStep().getArgsJson()), wire);
    assertTrue(wire.contains("12345678901234567890"), wire);
  }

  @Test
  void errorIsAnEvent() {
    List<EngineEvent> events = collect(client.run(scenario("error")));
    checkRules(events);
    assertEquals("model.bad_response", events.get(events.size() - 1).getError().getDiagnosis().getCode());
  }

  @Test
  void refusalsAreTyped() {
    assertRefused("UNKNOWN_AGENT", () -> client.run(scenario("text").toBuilder().setAgent("nobody").build()));
    assertRefused("UNKNOWN_RUN", () -> client.getRun("no-such-run"));
    assertRefused("UNKNOWN_RUN", () -> client.attach(AttachRequest.newBuilder().setRunId("no-such-run").build()));
  }

  @ParameterizedTest
  @CsvSource({"DECISION_ACTION_APPROVE,Done: paid 5 to a.", "DECISION_ACTION_REJECT,It was refused."})
  void approval(DecisionAction action, String text) {
    RunStream stream = client.run(scenario("approval"));
    List<EngineEvent> events = collect(stream);
    InterruptItem asked = view(events).interrupts().get(0);
    assertEquals("pay", asked.getToolName());
    ResumeRequest answer = ResumeRequest.newBuilder().setRunId(stream.runId())
        .addDecisions(Decision.newBuilder().setInterruptId(asked.getId()).setAction(action)
            .setArgsHash(asked.getArgsHash())).build();
    events.addAll(collect(client.resume(answer)));
    checkRules(events);
    assertEquals(text, view(events).text());
    assertRefused("ALREADY_ANSWERED", () -> client.resume(answer));
  }

  @Test
  void question() {
    RunStream stream = client.run(scenario("question"));
    List<EngineEvent> events = collect(stream);
    InterruptItem asked = view(events).interrupts().get(0);
    events.addAll(collect(client.resume(ResumeRequest.newBuilder().setRunId(stream.runId())
        .addDecisions(Decision.newBuilder().setInterruptId(asked.getId())
            .setAction(DecisionAction.DECISION_ACTION_RESPOND).setResponseJson("\"blue\"")).build())));
    checkRules(events);
    assertTrue(view(events).text().contains("blue"));
  }

  @Test
  void cancelKeepsTheText() {
    List<EngineEvent> events = new ArrayList<>();
    RunStream stream = client.run(scenario("slow"));
    for (EngineEvent event : stream) {
      events.add(event);
      if (events.size() == 3) {
        client.cancel(stream.runId(), "enough");
      }
    }
    checkRules(events);
    EngineEvent last = events.get(events.size() - 1);
    assertEquals(StopReason.STOP_REASON_CANCELLED, last.getDone().getStopReason());
    assertTrue(last.getDone().getContent().startsWith("000 "));
  }

  @Test
  void theSameRequestGivesTheSameEvents() {
    RunRequest request = scenario("tool").toBuilder().setRequestId(EngineClient.newRequestId()).build();
    assertEquals(collect(client.run(request)), collect(client.run(request)), "R12");
  }

  @Test
  void attachGivesWhatFollows() {
    RunStream stream = client.run(scenario("tool"));
    List<EngineEvent> events = collect(stream);
    AttachRequest.Builder request = AttachRequest.newBuilder().setRunId(stream.runId());
    for (int after = 0; after < events.size(); after++) {
      List<EngineEvent> rest = collect(client.attach(request.setAfterSeq(after).build()));
      assertEquals(events.subList(after, events.size()), rest, "R10");
    }
    assertRefused("AFTER_SEQ_OUT_OF_RANGE", () -> client.attach(request.setAfterSeq(1000).build()));
  }

  @Test
  void runsAreListedPageByPage() {
    RunStream stream = client.run(scenario("text"));
    collect(stream);
    List<String> found = new ArrayList<>();
    for (Run run : client.runs(
        ListRunsRequest.newBuilder().setPageSize(1).setConversationId(stream.conversationId()).build())) {
      found.add(run.getId());
    }
    assertEquals(List.of(stream.runId()), found);
  }

  @Test
  void subscriberGetsEveryEvent() throws Exception {
    List<EngineEvent> events = new ArrayList<>();
    CompletableFuture<Void> completed = new CompletableFuture<>();
    var executor = Executors.newCachedThreadPool();
    client.run(scenario("long")).publisher(executor).subscribe(new Flow.Subscriber<>() {
      private Flow.Subscription subscription;

      @Override
      public void onSubscribe(Flow.Subscription granted) {
        subscription = granted;
        subscription.request(1);
      }

      @Override
      public void onNext(EngineEvent event) {
        events.add(event);
        subscription.request(1);
      }

      @Override
      public void onError(Throwable error) {
        completed.completeExceptionally(error);
      }

      @Override
      public void onComplete() {
        completed.complete(null);
      }
    });
    completed.get(120, TimeUnit.SECONDS);
    executor.shutdown();
    checkRules(events);
  }

  @Test
  void killLosesAndDoublesNothing() throws Exception {
    List<EngineEvent> events = new ArrayList<>();
    RunStream stream = client.run(scenario("slow"));
    for (EngineEvent event : stream) {
      events.add(event);
      if (events.size() == 5) {
        var request = HttpRequest.newBuilder(URI.create(System.getenv("DUALCLAW_CONTROL") + "/kill"))
            .POST(HttpRequest.BodyPublishers.noBody()).build();
        var answer = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.discarding());
        assertEquals(204, answer.statusCode());
      }
    }
    checkRules(events);
    assertTrue(stream.reconnects() > 0);
    assertTrue(view(events).text().endsWith("198 199 "));
  }
}
