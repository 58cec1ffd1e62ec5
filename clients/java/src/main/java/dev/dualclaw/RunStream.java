package dev.dualclaw;

import dev.dualclaw.v1.AttachRequest;
import dev.dualclaw.v1.EngineEvent;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Objects;
import java.util.Optional;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;

/**
 * The events of a run or segment, each once and in order, over lost connections. It is read once, by one thread at a
 * time; closing it, from any thread, ends the call at once and never the run.
 *
 * <p>Rules, and their reasons:
 *
 * <ul>
 *   <li>What was seen already is skipped; what was left out counts as a loss.
 *   <li>A start whose answer got lost is sent again with its request_id; once an event was seen, Attach goes on after it.
 *   <li>The engine's own refusal is final. Of an attach, those are not that pass by themselves.
 *   <li>Trouble ends by progress. Without a new event for {@link Reconnect#total()} the stream fails.
 *   <li>"Nobody listens there" at the very first attempt fails at once: waiting would not help who has mistyped. A
 *       client that has reached its engine before waits: the address is right, and the engine restarts. {@link
 *       Reconnect#start()} bounds both.
 *   <li>TLS that fails, or what the program's own token or interceptor throws, is no loss of a start, only of a stream
 *       that was there already.
 *   <li>All its calls are made in the gRPC context of its start, whose cancellation or deadline ends it.
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
  private final Context context = Context.current();
  private final Context.CancellationListener onCancel = cancelled -> leave();
  private final boolean oneSegment;
  private final BackOff backOff;
  private final Deque<EngineEvent> buffer = new ArrayDeque<>();
  private final AtomicBoolean taken = new AtomicBoolean();
  private final CountDownLatch left = new CountDownLatch(1);
  private volatile boolean closed;
  private volatile Runnable onLeave = () -> { };
  private volatile StreamCall call;
  private volatile String runId;
  private volatile String conversationId;
  private volatile int lastSeq;
  private volatile int reconnects;
  private int seen;
  private boolean accepted;
  private boolean ended;
  private boolean stalled;
  /** There has been an engine at this place. */
  private boolean reached;
  /** An attach is open and has brought no message yet. */
  private boolean refusable;

  private RunStream(EngineClient client, Start start) {
    this.client = client;
    this.start = start;
    backOff = new BackOff(client.reconnect());
    oneSegment = !(start instanceof Start.OfAttach);
    runId = start.runId();
    conversationId = start instanceof Start.OfRun run ? run.request().getConversationId() : "";
    seen = start instanceof Start.OfAttach attach ? attach.request().getAfterSeq() : 0;
    lastSeq = seen;
  }

  static RunStream open(EngineClient client, Start start) {
    RunStream stream = new RunStream(client, start);
    client.add(stream);
    stream.context.addListener(stream.onCancel, Runnable::run);
    try {
      stream.connect();
      stream.throwIfCutOff();
    } catch (InterruptedException interrupted) {
      throw stream.interrupted();
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
    context.removeListener(onCancel);
    client.remove(this);
    leave();
  }

  /**
   * Returns the events, once; {@code hasNext} waits for the next one.
   *
   * <p>It throws EngineException when the stream is lost for good or the deadline of its gRPC context has passed, and
   * CancellationException when the thread is interrupted, the context cancelled or the client closed.
   *
   * @throws IllegalStateException the stream has a reader
   */
  @Override
  public Iterator<EngineEvent> iterator() {
    if (taken.getAndSet(true)) {
      throw new IllegalStateException("a stream is read once; attach with its runId and lastSeq goes on after it");
    }
    return new Iterator<>() {
      private EngineEvent ready;

      @Override
      public boolean hasNext() {
        if (ready == null) {
          ready = read();
        }
        return ready != null;
      }

      @Override
      public EngineEvent next() {
        if (!hasNext()) {
          throw new NoSuchElementException();
        }
        EngineEvent event = ready;
        ready = null;
        lastSeq = Math.max(lastSeq, event.getSeq());
        return event;
      }
    };
  }

  /**
   * Returns the events as a publisher for one subscriber, in place of iterating. It takes a thread of the executor until
   * the stream ends and reads as the subscriber asks, at most one message ahead. Cancelling closes the stream at once.
   */
  public Flow.Publisher<EngineEvent> publisher(Executor executor) {
    Objects.requireNonNull(executor, "executor");
    return subscriber -> Subscription.start(this, Objects.requireNonNull(subscriber, "subscriber"), executor);
  }

  /** Ends call and waits, for whichever reason. */
  void leave() {
    left.countDown();
    hangUp();
    onLeave.run();
  }

  boolean isLeft() {
    Deadline deadline = context.getDeadline(); // the call's own ends it a little before the context hears of it
    return left.getCount() == 0 || deadline != null && deadline.isExpired();
  }

  /** Asks to be told when the stream is left. */
  void onLeave(Runnable told) {
    onLeave = told;
  }

  /** Throws the reason when the stream was left and not closed. */
  void throwIfCutOff() {
    RuntimeException reason = closed || !isLeft() ? null : client.cutOff(context);
    if (reason != null) {
      throw reason;
    }
  }

  /** Reads until there is a new event; null at the end. */
  private EngineEvent read() {
    try {
      while (!isLeft()) {
        EngineEvent event = buffer.poll();
        if (event != null) {
          return event;
        }
        if (ended) {
          awaitStatus();
          close();
        } else {
          advance();
        }
      }
      throwIfCutOff();
      return null;
    } catch (InterruptedException interrupted) {
      throw interrupted();
    } catch (RuntimeException error) {
      close();
      throw error;
    }
  }

  private CancellationException interrupted() {
    close();
    Thread.currentThread().interrupt();
    return new CancellationException("interrupted while reading " + position());
  }

  /** Takes a message, or a lost stream up again. */
  private void advance() throws InterruptedException {
    StreamCall open = call;
    if (open == null) {
      connect();
      return;
    }
    try {
      take(open.next(FOREVER));
    } catch (LostException lost) {
      hangUp();
      if (isLeft()) {
        return;
      }
      if (refusable && !lost.what.attach()) {
        throw lost.what.error();
      }
      pause(lost.what);
    }
  }

  /** Keeps what is new of a message and notes where the stream stands. */
  private void take(Optional<StreamCall.Arrival> arrival) throws LostException {
    if (arrival.isPresent() && arrival.get() instanceof StreamCall.End end && !end.status().isOk()) {
      throw new LostException(Lost.judge(end.status(), end.trailers(), client.target()));
    }
    refusable = false;
    if (!(arrival.isPresent() && arrival.get() instanceof StreamCall.Batch batch)) {
      if (oneSegment) {
        throw stall("the engine ended the stream before the end of the segment");
      }
      ended = true;
      call = null; // it has ended by itself
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
      backOff.progress();
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
        EngineException.of("INTERNAL", problem + " (" + position() + ")", Status.Code.INTERNAL, null);
    if (stalled) {
      throw error;
    }
    stalled = true;
    return new LostException(new Lost(error, true, true, true));
  }

  /** Opens a call and waits until the engine has accepted it, as often as it takes, or the stream is left. */
  private void connect() throws InterruptedException {
    while (!isLeft()) {
      try {
        openCall();
        if (accepted) {
          reconnects++;
        }
        accepted = true;
        return;
      } catch (LostException lost) {
        hangUp();
        if (isLeft()) {
          return;
        }
        reached |= lost.what.connected();
        if (!mayRepeat(lost.what)) {
          throw lost.what.error();
        }
        pause(lost.what);
      }
    }
  }

  private boolean mayRepeat(Lost lost) {
    if (accepted) {
      return lost.attach();
    }
    return lost.again() && (lost.connected() || !patience().isZero());
  }

  /** How long a start waits while nobody answers. */
  private Duration patience() {
    Reconnect limits = client.reconnect();
    return limits.start().orElse(reached || client.reached() ? limits.total() : Duration.ZERO);
  }

  private void openCall() throws LostException, InterruptedException {
    Start next = start;
    if (accepted && (seen > 0 || !oneSegment)) {
      boolean wait = start instanceof Start.OfAttach attach && attach.request().getWait();
      next = new Start.OfAttach(
          AttachRequest.newBuilder().setRunId(runId).setAfterSeq(seen).setWait(wait).build());
    }
    refusable = next instanceof Start.OfAttach;
    if (backOff.inTrouble()) {
      client.endBackOff();
    }
    StreamCall opened = open(next);
    call = opened;
    if (isLeft()) { // meanwhile, by another thread
      hangUp();
    }
    // An attach to a silent run of an engine that sends no headers may bring nothing for a long time.
    Optional<StreamCall.Arrival> first = opened.peek(oneSegment ? START_TIMEOUT : HEADERLESS_WAIT);
    if (first.isEmpty() && !oneSegment) {
      if (client.isConnected()) {
        return;
      }
      first = opened.peek(START_TIMEOUT);
    }
    if (first.isEmpty()) {
      throw new LostException(Lost.silence(client.target(), START_TIMEOUT.toSeconds()));
    }
    if (first.get() instanceof StreamCall.Headers headers && headers.metadata().containsKey(RUN_ID)) {
      runId = headers.metadata().get(RUN_ID);
      String conversation = headers.metadata().get(CONVERSATION_ID);
      if (conversation != null && !conversation.isEmpty()) {
        conversationId = conversation;
      }
      return;
    }
    // A refusal without headers, or a foreign engine that sends none: the first message or the status tells which.
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

  private StreamCall open(Start next) throws LostException {
    Context before = context.attach();
    try {
      return next.open(client);
    } catch (RuntimeException fault) {
      throw new LostException(Lost.fault(fault, client.target()));
    } finally {
      context.detach(before);
    }
  }

  /** Waits before the next attempt; throws when there is none left. */
  private void pause(Lost lost) throws InterruptedException {
    Duration total = client.reconnect().total();
    long delay = backOff.next(lost, accepted || lost.connected() ? total : patience());
    if (delay < 0) {
      if (!accepted) {
        throw lost.error();
      }
      String text = "the stream was lost and not taken up again within %d s (%s); last: %s"
          .formatted(total.toSeconds(), position(), lost.error().getMessage());
      throw EngineException.unreachable(text, Status.Code.UNAVAILABLE, lost.error());
    }
    Deadline deadline = context.getDeadline();
    long rest = deadline == null ? delay : Math.min(delay, deadline.timeRemaining(TimeUnit.NANOSECONDS));
    left.await(rest, TimeUnit.NANOSECONDS);
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
