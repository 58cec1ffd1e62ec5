package dev.dualclaw;

import dev.dualclaw.v1.AttachRequest;
import dev.dualclaw.v1.EngineEvent;
import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.concurrent.CancellationException;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.concurrent.SubmissionPublisher;
import java.util.concurrent.ThreadLocalRandom;

/**
 * The events of a run or segment, each once and in order, over lost connections. One thread iterates it, once; closing
 * it, from any thread, ends the call at once and never the run.
 *
 * <p>Rules, and their reasons:
 *
 * <ul>
 *   <li>What was seen already is skipped; what was left out counts as a loss.
 *   <li>A start whose answer got lost is sent again with its request_id; once an event was seen, Attach goes on after it.
 *   <li>The engine's own refusal is final. Of an attach, those are not that pass by themselves.
 *   <li>Trouble ends by progress. Without a new event for {@link Reconnect#total()} the stream fails.
 *   <li>"Nobody listens there" at the very first attempt fails at once: waiting would not help who has mistyped.
 * </ul>
 */
public final class RunStream implements Iterable<EngineEvent>, AutoCloseable {
  private static final Metadata.Key<String> RUN_ID =
      Metadata.Key.of("dualclaw-run-id", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<String> CONVERSATION_ID =
      Metadata.Key.of("dualclaw-conversation-id", Metadata.ASCII_STRING_MARSHALLER);
  private static final Duration START_TIMEOUT = Duration.ofSeconds(30);
  private static final Duration HEADERLESS_WAIT = Duration.ofSeconds(1);
  private static final Duration STATUS_WAIT = Duration.ofMillis(500);
  private static final Duration FOREVER = Duration.ofDays(365);

  private final EngineClient client;
  private final Start start;
  private final boolean oneSegment;
  private final Deque<EngineEvent> buffer = new ArrayDeque<>();
  private volatile StreamCall call;
  private volatile boolean closed;
  private volatile String runId;
  private volatile String conversationId;
  private volatile int lastSeq;
  private volatile int reconnects;
  private int seen;
  private boolean accepted;
  private boolean ended;
  private boolean stalled;
  /** An attach is open and has brought no message yet. */
  private boolean refusable;
  private int attempts;
  private long troubleSince;

  private RunStream(EngineClient client, Start start) {
    this.client = client;
    this.start = start;
    oneSegment = !(start instanceof Start.OfAttach);
    runId = start.runId();
    conversationId = start instanceof Start.OfRun run ? run.request().getConversationId() : "";
    seen = start instanceof Start.OfAttach attach ? attach.request().getAfterSeq() : 0;
    lastSeq = seen;
  }

  static RunStream open(EngineClient client, Start start) {
    RunStream stream = new RunStream(client, start);
    try {
      stream.connect();
    } catch (LostException lost) {
      stream.close();
      throw lost.what.error();
    } catch (RuntimeException error) {
      stream.close();
      throw error;
    }
    return stream;
  }

  /** Id of the run. */
  public String runId() {
    return runId;
  }

  /** Id of its conversation; "" when the engine has not said it. */
  public String conversationId() {
    return conversationId;
  }

  /** Position of the newest event handed out; keep it to attach later. */
  public int lastSeq() {
    return lastSeq;
  }

  /** How often the stream was lost and taken up again. */
  public int reconnects() {
    return reconnects;
  }

  /** Ends the call at once; the run goes on. Whoever still reads sees the end of the stream. */
  @Override
  public void close() {
    closed = true;
    hangUp();
  }

  /**
   * Returns the events; {@code hasNext} waits for the next one.
   *
   * <p>They throw EngineException when the stream is lost for good, and CancellationException when the thread is
   * interrupted.
   */
  @Override
  public Iterator<EngineEvent> iterator() {
    return new Iterator<>() {
      @Override
      public boolean hasNext() {
        return !buffer.isEmpty() || fill();
      }

      @Override
      public EngineEvent next() {
        if (!hasNext()) {
          throw new NoSuchElementException();
        }
        EngineEvent event = buffer.remove();
        lastSeq = Math.max(lastSeq, event.getSeq());
        return event;
      }
    };
  }

  /**
   * Publishes the events to one subscriber, in place of iterating: read on a thread of the executor as fast as the
   * subscriber asks for them. Cancelling the subscription closes the stream.
   */
  public void subscribe(Flow.Subscriber<? super EngineEvent> subscriber, Executor executor) {
    executor.execute(() -> {
      // Direct delivery: the reading thread waits in submit until the subscriber has room.
      try (SubmissionPublisher<EngineEvent> publisher = new SubmissionPublisher<>(executor, 64); this) {
        publisher.subscribe(subscriber);
        try {
          for (EngineEvent event : this) {
            if (!publisher.hasSubscribers()) {
              return;
            }
            publisher.submit(event);
          }
        } catch (RuntimeException error) {
          publisher.closeExceptionally(error);
        }
      }
    });
  }

  /** Reads until there is a new event; false at the end. */
  private boolean fill() {
    try {
      while (buffer.isEmpty() && !ended && !closed) {
        try {
          if (call == null) {
            connect();
          }
          take(call.next(FOREVER));
        } catch (LostException lost) {
          hangUp();
          if (closed) {
            break;
          }
          if (refusable && !lost.what.attach()) {
            throw lost.what.error();
          }
          pause(lost.what);
        }
      }
      if (buffer.isEmpty() && !closed) {
        awaitStatus();
        close();
      }
      return !buffer.isEmpty();
    } catch (InterruptedException interrupted) {
      throw interrupted();
    }
  }

  private CancellationException interrupted() {
    close();
    Thread.currentThread().interrupt();
    return new CancellationException("interrupted while reading " + position());
  }

  /** Keeps what is new of a message and notes where the stream stands. */
  private void take(Optional<StreamCall.Arrival> arrival) throws LostException {
    if (arrival.isPresent() && arrival.get() instanceof StreamCall.End end && !end.status().isOk()) {
      throw new LostException(Lost.judge(end.status(), end.trailers(), client));
    }
    refusable = false;
    if (!(arrival.isPresent() && arrival.get() instanceof StreamCall.Batch batch)) {
      if (oneSegment) {
        throw stall("the engine ended the stream before the end of the segment");
      }
      ended = true;
      return;
    }
    for (EngineEvent event : batch.events()) {
      int seq = event.getSeq();
      if (seq > 0 && seq <= seen) {
        continue;
      }
      if (seq > seen + 1 && (seen > 0 || !oneSegment)) {
        if (buffer.isEmpty()) {
          throw stall("the engine left out event " + (seen + 1));
        }
        hangUp(); // what came before the gap is good; after it the next read attaches
        return;
      }
      buffer.add(event);
      seen = Math.max(seen, seq);
      attempts = 0;
      troubleSince = 0;
      stalled = false;
      if (oneSegment && (event.hasDone() || event.hasError())) {
        ended = true;
        return;
      }
    }
  }

  /** Counts a stream that the engine spoilt as lost, once; spoilt again at the same place it fails. */
  private LostException stall(String problem) {
    EngineException error =
        EngineException.of("INTERNAL", problem + " (" + position() + ")", Status.Code.INTERNAL);
    if (stalled) {
      throw error;
    }
    stalled = true;
    return new LostException(new Lost(error, true, true, true));
  }

  /** Opens a call and waits until the engine has accepted it, as often as it takes. */
  private void connect() throws LostException {
    while (true) {
      try {
        openCall();
        if (accepted) {
          reconnects++;
        }
        accepted = true;
        return;
      } catch (LostException lost) {
        hangUp();
        boolean repeat = accepted ? lost.what.attach()
            : lost.what.again() && (lost.what.connected() || troubleSince != 0);
        if (closed || !repeat) {
          throw lost.what.error();
        }
        try {
          pause(lost.what);
        } catch (InterruptedException interrupted) {
          throw interrupted();
        }
      } catch (InterruptedException interrupted) {
        throw interrupted();
      }
    }
  }

  private void openCall() throws LostException, InterruptedException {
    Start next = start;
    if (accepted && (seen > 0 || !oneSegment)) {
      boolean wait = start instanceof Start.OfAttach attach && attach.request().getWait();
      next = new Start.OfAttach(
          AttachRequest.newBuilder().setRunId(runId).setAfterSeq(seen).setWait(wait).build());
    }
    refusable = next instanceof Start.OfAttach;
    StreamCall opened = next.open(client);
    call = opened;
    if (closed) { // meanwhile, by another thread
      hangUp();
    }
    Optional<StreamCall.Arrival> first = opened.peek(START_TIMEOUT);
    if (first.isEmpty()) {
      String text = "the engine at %s did not answer within %d s".formatted(client.target(), START_TIMEOUT.toSeconds());
      throw new LostException(
          new Lost(EngineException.unreachable(text, Status.Code.UNAVAILABLE, null), true, true, true));
    }
    if (first.get() instanceof StreamCall.Headers headers && headers.metadata().containsKey(RUN_ID)) {
      runId = headers.metadata().get(RUN_ID);
      String conversation = headers.metadata().get(CONVERSATION_ID);
      if (conversation != null && !conversation.isEmpty()) {
        conversationId = conversation;
      }
      return;
    }
    // A refusal without headers, or a foreign engine that sends none: the first message or the status tells which. An
    // attach to a silent run may bring neither for a long time, so of that nobody waits long.
    Optional<StreamCall.Arrival> message = opened.next(oneSegment ? START_TIMEOUT : HEADERLESS_WAIT);
    if (message.isEmpty()) {
      return;
    }
    if (message.get() instanceof StreamCall.Batch batch && batch.events().size() > 0
        && !batch.events().get(0).getRunId().isEmpty()) {
      runId = batch.events().get(0).getRunId();
    }
    take(message);
  }

  /** Waits before the next attempt; throws when there is none left. */
  private void pause(Lost lost) throws InterruptedException {
    long now = System.nanoTime();
    if (troubleSince == 0) {
      troubleSince = now;
    }
    Reconnect limits = client.reconnect();
    long delay = 0;
    if (attempts > 0) {
      double doubled = limits.first().toNanos() * Math.pow(2, Math.min(attempts - 1, 30));
      delay = (long) (Math.min(limits.longest().toNanos(), doubled) * ThreadLocalRandom.current().nextDouble(0.5, 1.5));
      delay = Math.max(delay, lost.error().retryAfter().map(Duration::toNanos).orElse(0L));
    }
    attempts++;
    if (now + delay - troubleSince >= limits.total().toNanos()) {
      if (!accepted) {
        throw lost.error();
      }
      String text = "the stream was lost and not taken up again within %d s (%s); last: %s"
          .formatted(limits.total().toSeconds(), position(), lost.error().getMessage());
      throw EngineException.unreachable(text, Status.Code.UNAVAILABLE, lost.error());
    }
    Thread.sleep(delay / 1_000_000, (int) (delay % 1_000_000));
  }

  /** Lets the call end by itself after its last event, so that both sides record OK and no cancellation. */
  private void awaitStatus() throws InterruptedException {
    StreamCall last = call;
    if (last != null) {
      last.next(STATUS_WAIT);
    }
  }

  private String position() {
    return "run " + (runId.isEmpty() ? "unknown" : runId) + ", after event " + seen;
  }

  private void hangUp() {
    StreamCall open = call;
    call = null;
    if (open != null) {
      open.hangUp();
    }
  }

  private static final class LostException extends Exception {
    private static final long serialVersionUID = 1;
    private final transient Lost what;

    LostException(Lost what) {
      super(null, what.error(), false, false);
      this.what = what;
    }
  }
}
