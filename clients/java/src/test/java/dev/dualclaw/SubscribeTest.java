package dev.dualclaw;

import static dev.dualclaw.FakeEngine.HANG;
import static dev.dualclaw.FakeEngine.delta;
import static dev.dualclaw.FakeEngine.done;
import static dev.dualclaw.FakeEngine.script;
import static dev.dualclaw.FakeEngine.seqs;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.dualclaw.v1.EngineEvent;
import java.io.IOException;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Flow;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** The rules of Flow, held with one thread. */
@Timeout(value = 120, unit = TimeUnit.SECONDS)
class SubscribeTest {
  private final ExecutorService one = Executors.newSingleThreadExecutor();
  private FakeEngine fake;
  private EngineClient client;

  private RunStream serve(Object... played) throws IOException {
    fake = FakeEngine.serve(played);
    client = fake.client();
    return client.ask("hi");
  }

  @AfterEach
  void stop() {
    one.shutdownNow();
    client.close();
    fake.close();
  }

  /** Notes what it is told, and asks for so many at first. */
  private static class Noting implements Flow.Subscriber<EngineEvent> {
    final List<Integer> seqs = new CopyOnWriteArrayList<>();
    final CountDownLatch over = new CountDownLatch(1);
    final long first;
    volatile Flow.Subscription subscription;
    volatile Throwable error;

    Noting(long first) {
      this.first = first;
    }

    @Override
    public void onSubscribe(Flow.Subscription granted) {
      subscription = granted;
      if (first != 0) {
        granted.request(first);
      }
    }

    @Override
    public void onNext(EngineEvent event) {
      seqs.add(event.getSeq());
    }

    @Override
    public void onError(Throwable thrown) {
      error = thrown;
      over.countDown();
    }

    @Override
    public void onComplete() {
      over.countDown();
    }

    void await() throws InterruptedException {
      assertTrue(over.await(60, TimeUnit.SECONDS));
    }
  }

  private static Object[] many(int count) {
    return IntStream.rangeClosed(1, count).mapToObj(seq -> seq == count ? done(seq) : delta(seq)).toArray();
  }

  @Test
  void manyEventsNeedOneThread() throws Exception {
    RunStream stream = serve(many(500));
    Noting reader = new Noting(1) {
      @Override
      public void onNext(EngineEvent event) {
        super.onNext(event);
        subscription.request(1);
      }
    };
    stream.publisher(one).subscribe(reader);
    reader.await();
    assertEquals(IntStream.rangeClosed(1, 500).boxed().toList(), reader.seqs);
  }

  @Test
  void noEventComesUnaskedNorCountsAsHandedOut() throws Exception {
    RunStream stream = serve(many(10));
    Noting reader = new Noting(2);
    stream.publisher(one).subscribe(reader);
    FakeEngine.until(() -> reader.seqs.size() == 2);
    reader.subscription.request(3);
    FakeEngine.until(() -> reader.seqs.size() == 5);
    assertEquals(5, stream.lastSeq());
    reader.subscription.request(Long.MAX_VALUE);
    reader.subscription.request(Long.MAX_VALUE);
    reader.await();
    assertEquals(10, reader.seqs.size());
  }

  @Test
  void cancellingASilentStreamEndsItsCall() throws Exception {
    RunStream stream = serve(delta(1), HANG);
    Noting reader = new Noting(Long.MAX_VALUE);
    stream.publisher(one).subscribe(reader);
    FakeEngine.until(() -> reader.seqs.size() == 1);
    reader.subscription.cancel();
    assertTrue(fake.left.tryAcquire(60, TimeUnit.SECONDS));
    one.submit(() -> { }).get(60, TimeUnit.SECONDS); // its thread is free again
    assertEquals(1, reader.over.getCount());
  }

  @Test
  void cancellingWithoutDemandEndsItToo() throws Exception {
    RunStream stream = serve(delta(1), HANG);
    Noting reader = new Noting(0);
    stream.publisher(one).subscribe(reader);
    FakeEngine.until(() -> reader.subscription != null);
    reader.subscription.cancel();
    assertTrue(fake.left.tryAcquire(60, TimeUnit.SECONDS));
    one.submit(() -> { }).get(60, TimeUnit.SECONDS);
    assertEquals(List.of(), reader.seqs);
  }

  @Test
  void closingTheStreamCompletesIt() throws Exception {
    RunStream stream = serve(delta(1), delta(2), HANG);
    Noting reader = new Noting(1);
    stream.publisher(one).subscribe(reader);
    FakeEngine.until(() -> reader.seqs.size() == 1);
    stream.close();
    reader.await();
    assertEquals(null, reader.error);
  }

  @Test
  void aRequestOfNothingIsAnError() throws Exception {
    RunStream stream = serve(delta(1), HANG);
    Noting reader = new Noting(-1);
    stream.publisher(one).subscribe(reader);
    reader.await();
    assertInstanceOf(IllegalArgumentException.class, reader.error);
    assertTrue(fake.left.tryAcquire(60, TimeUnit.SECONDS));
  }

  @Test
  void aSubscriberThatThrowsEndsTheCallAndIsTold() throws Exception {
    RunStream stream = serve(delta(1), HANG);
    Noting reader = new Noting(1) {
      @Override
      public void onNext(EngineEvent event) {
        throw new IllegalStateException("full");
      }
    };
    stream.publisher(one).subscribe(reader);
    reader.await();
    assertEquals("full", reader.error.getMessage());
    assertTrue(fake.left.tryAcquire(60, TimeUnit.SECONDS));
  }

  @Test
  void aLostStreamIsAnError() throws Exception {
    fake = FakeEngine.serve(script(delta(1), FakeEngine.refusal(io.grpc.Status.Code.INTERNAL, "INTERNAL")));
    client = fake.builder().reconnect(FakeEngine.QUICK.withTotal(Duration.ofMillis(500))).build();
    RunStream stream = client.ask("hi");
    Noting reader = new Noting(9);
    stream.publisher(one).subscribe(reader);
    reader.await();
    assertInstanceOf(EngineException.class, reader.error);
    assertEquals(List.of(1), reader.seqs);
  }

  @Test
  void theSecondReaderIsToldSo() throws Exception {
    RunStream stream = serve(delta(1), done(2));
    seqs(stream);
    Noting reader = new Noting(9);
    stream.publisher(one).subscribe(reader);
    reader.await();
    assertInstanceOf(IllegalStateException.class, reader.error);
  }

  @Test
  void anExecutorThatRefusesEndsTheCall() throws Exception {
    RunStream stream = serve(delta(1), HANG);
    one.shutdown();
    Noting reader = new Noting(9);
    stream.publisher(one).subscribe(reader);
    reader.await();
    assertInstanceOf(RejectedExecutionException.class, reader.error);
    assertTrue(fake.left.tryAcquire(60, TimeUnit.SECONDS));
    assertThrows(NullPointerException.class, () -> stream.publisher(one).subscribe(null));
  }
}
