package dev.dualclaw;

import static dev.dualclaw.FakeEngine.BROKEN;
import static dev.dualclaw.FakeEngine.HANG;
import static dev.dualclaw.FakeEngine.delta;
import static dev.dualclaw.FakeEngine.done;
import static dev.dualclaw.FakeEngine.script;
import static dev.dualclaw.FakeEngine.seqs;
import static dev.dualclaw.FakeEngine.until;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.dualclaw.v1.EngineEvent;
import io.grpc.Context;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** Whoever leaves a stream, in whichever way and state, is rid of it at once. */
@Timeout(value = 120, unit = TimeUnit.SECONDS)
class LeavingTest {
  private FakeEngine fake;
  private EngineClient client;

  private void serve(Object[]... played) throws IOException {
    fake = FakeEngine.serve(played);
    client = fake.builder().reconnect(FakeEngine.SLOW).build();
  }

  @AfterEach
  void stop() {
    client.close();
    fake.close();
  }

  /** Reads a stream whose second attempt to go on is an hour away, on a thread of its own. */
  private CompletableFuture<List<Integer>> readToTheLongWait(RunStream stream) throws InterruptedException {
    CompletableFuture<List<Integer>> reading = CompletableFuture.supplyAsync(() -> seqs(stream));
    until(() -> fake.attaches.size() == 1);
    return reading;
  }

  private static Throwable failure(CompletableFuture<?> reading) {
    try {
      return assertThrows(ExecutionException.class, () -> reading.get(60, TimeUnit.SECONDS)).getCause();
    } catch (CancellationException cancelled) {
      return cancelled;
    }
  }

  @Test
  void beforeTheFirstReadTheCallEnds() throws Exception {
    serve(script(delta(1), HANG));
    RunStream stream = client.ask("hi");
    stream.close();
    assertTrue(fake.left.tryAcquire(60, TimeUnit.SECONDS));
    assertEquals(List.of(), seqs(stream));
  }

  @Test
  void duringAReadTheReadEndsToo() throws Exception {
    serve(script(delta(1), HANG));
    RunStream stream = client.ask("hi");
    Iterator<EngineEvent> events = stream.iterator();
    assertEquals(1, events.next().getSeq());
    Thread closing = new Thread(stream::close);
    closing.start();
    assertFalse(events.hasNext());
    closing.join();
    assertTrue(fake.left.tryAcquire(60, TimeUnit.SECONDS));
    assertEquals(List.of(), fake.attaches);
  }

  @Test
  void nothingMoreIsGivenOfWhatCameInOneMessage() throws Exception {
    serve(script((Object) new EngineEvent[] {delta(1), delta(2), done(3)}));
    RunStream stream = client.ask("hi");
    List<Integer> found = new ArrayList<>();
    for (EngineEvent event : stream) {
      found.add(event.getSeq());
      stream.close();
    }
    assertEquals(List.of(1), found);
    assertEquals(1, stream.lastSeq());
  }

  /** For a loop that is closed by another thread between the two. */
  @Test
  void anEventThatWasPromisedIsGiven() throws Exception {
    serve(script(delta(1), HANG));
    RunStream stream = client.ask("hi");
    Iterator<EngineEvent> events = stream.iterator();
    assertTrue(events.hasNext());
    stream.close();
    assertEquals(1, events.next().getSeq());
    assertFalse(events.hasNext());
  }

  @Test
  void duringTheWaitForTheNextAttemptTheReadEnds() throws Exception {
    serve(script(delta(1), BROKEN), script(BROKEN));
    RunStream stream = client.ask("hi");
    CompletableFuture<List<Integer>> reading = readToTheLongWait(stream);
    stream.close();
    assertEquals(List.of(1), reading.get(60, TimeUnit.SECONDS));
    assertEquals(1, fake.attaches.size());
  }

  /** Many times over, so that closing meets every state of a stream that is being taken up again. */
  @Test
  void inWhicheverStateNoErrorComesOfIt() throws Exception {
    serve();
    client.close();
    client = fake.client();
    for (int i = 0; i < 200; i++) {
      fake.play(script(delta(1), BROKEN), script(delta(2), BROKEN), script(delta(3), HANG));
      RunStream stream = client.ask("hi");
      CompletableFuture<List<Integer>> reading = CompletableFuture.supplyAsync(() -> seqs(stream));
      long pause = i * 20_000L;
      long from = System.nanoTime();
      while (System.nanoTime() - from < pause) {
        Thread.onSpinWait();
      }
      stream.close();
      reading.get(60, TimeUnit.SECONDS);
      until(() -> client.openStreams() == 0);
      fake.forget();
    }
  }

  @Test
  void closingTheClientEndsAReadAndAWaitAndSaysSo() throws Exception {
    serve(script(delta(1), HANG), script(delta(1), BROKEN), script(BROKEN));
    RunStream first = client.ask("hi");
    CompletableFuture<List<Integer>> reading = CompletableFuture.supplyAsync(() -> seqs(first));
    until(() -> first.lastSeq() == 1);
    CompletableFuture<List<Integer>> waiting = readToTheLongWait(client.ask("hi"));
    client.close();
    for (CompletableFuture<?> left : List.of(reading, waiting)) {
      Throwable cause = failure(left);
      assertInstanceOf(CancellationException.class, cause);
      assertTrue(cause.getMessage().contains("client was closed"), cause.getMessage());
    }
    assertThrows(IllegalStateException.class, () -> client.ask("hi"));
    assertThrows(IllegalStateException.class, () -> client.getRun("r"));
  }

  @Test
  void anInterruptedThreadIsCancelledAndItsFlagKept() throws Exception {
    serve(script(delta(1), HANG), script(BROKEN), script(BROKEN));
    Iterator<EngineEvent> events = client.ask("hi").iterator();
    events.next();
    Thread.currentThread().interrupt();
    assertThrows(CancellationException.class, events::hasNext);
    assertTrue(Thread.interrupted());
    Thread starting = Thread.currentThread();
    Thread interrupting = new Thread(() -> {
      try {
        until(() -> fake.runs.size() == 3);
      } catch (InterruptedException never) {
        return;
      }
      starting.interrupt();
    });
    interrupting.start();
    assertThrows(CancellationException.class, () -> client.ask("hi"));
    assertTrue(Thread.interrupted());
  }

  @Test
  void aCancelledContextEndsAReadAndAWait() throws Exception {
    List<Object[]> scripts = List.of(script(delta(1), HANG), script(delta(1), BROKEN));
    for (Object[] played : scripts) {
      serve(played, script(BROKEN));
      Context.CancellableContext caller = Context.current().withCancellation();
      RunStream stream = caller.call(() -> client.ask("hi"));
      CompletableFuture<List<Integer>> reading = CompletableFuture.supplyAsync(() -> seqs(stream));
      until(() -> stream.lastSeq() == 1);
      until(() -> played == scripts.get(0) || fake.attaches.size() == 1);
      IllegalStateException reason = new IllegalStateException("the caller has left");
      caller.cancel(reason);
      Throwable cause = failure(reading);
      assertInstanceOf(CancellationException.class, cause);
      assertEquals(reason, cause.getCause());
      stop();
    }
  }

  @Test
  void theDeadlineOfTheContextHoldsOverAllAttempts() throws Exception {
    serve(script(BROKEN), script(BROKEN));
    ScheduledExecutorService clock = Executors.newSingleThreadScheduledExecutor();
    try (var limited = Context.current().withDeadlineAfter(500, TimeUnit.MILLISECONDS, clock)) {
      EngineException late = assertThrows(EngineException.class, () -> limited.call(() -> client.ask("hi")));
      assertEquals(io.grpc.Status.Code.DEADLINE_EXCEEDED, late.code());
      assertInstanceOf(TimeoutException.class, late.getCause());
    } finally {
      clock.shutdownNow();
    }
  }

  @Test
  void aReaderOnAnotherThreadKeepsTheContextOfTheStart() throws Exception {
    serve(script(delta(1), BROKEN), script(done(2)));
    Context.Key<String> key = Context.key("trace");
    List<String> traces = new ArrayList<>();
    client.close();
    client = fake.builder().intercept(new Intercepting(() -> traces.add(key.get()))).build();
    RunStream stream = Context.current().withValue(key, "t").call(() -> client.ask("hi"));
    CompletableFuture.supplyAsync(() -> seqs(stream)).get(60, TimeUnit.SECONDS);
    assertEquals(List.of("t", "t"), traces);
  }
}
