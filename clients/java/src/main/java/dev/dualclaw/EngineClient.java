package dev.dualclaw;

import dev.dualclaw.v1.AgentServiceGrpc;
import dev.dualclaw.v1.AttachRequest;
import dev.dualclaw.v1.CancelRequest;
import dev.dualclaw.v1.ContentPart;
import dev.dualclaw.v1.ConversationServiceGrpc;
import dev.dualclaw.v1.EngineServiceGrpc;
import dev.dualclaw.v1.GetRunRequest;
import dev.dualclaw.v1.ListRunsRequest;
import dev.dualclaw.v1.ListRunsResponse;
import dev.dualclaw.v1.Message;
import dev.dualclaw.v1.OperatorServiceGrpc;
import dev.dualclaw.v1.ResumeRequest;
import dev.dualclaw.v1.Role;
import dev.dualclaw.v1.Run;
import dev.dualclaw.v1.RunRequest;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientInterceptor;
import io.grpc.ClientInterceptors;
import io.grpc.ConnectivityState;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Objects;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CancellationException;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.Supplier;
import java.util.regex.Pattern;

/**
 * A connection to one engine; safe for any number of threads. It connects with the first call. Its methods throw
 * EngineException for a call that failed, CancellationException for one that was cut off (by its thread's interruption,
 * its gRPC context or the client's end), and IllegalStateException once the client is closed.
 */
public final class EngineClient implements AutoCloseable {
  private static final int MAX_MESSAGE = 64 * 1024 * 1024;
  /** The engine caps its texts near 4 kB, of which a header makes three times as much, and details bring them again. */
  private static final int MAX_HEADERS = 64 * 1024;
  private static final Pattern ADDRESS =
      Pattern.compile("([^\\s/@?#:\\[\\]\\\\]+|\\[[0-9a-fA-F:.%]+\\]):\\d+|(?!https?:)[a-z][a-z0-9+.-]*:/.+");
  private static final SecureRandom RANDOM = new SecureRandom();

  private final ManagedChannel connection;
  private final Channel channel;
  private final String target;
  private final Reconnect reconnect;
  private final Watch watch = new Watch();
  private final Set<RunStream> open = ConcurrentHashMap.newKeySet();
  private volatile boolean closed;

  private EngineClient(Builder builder) {
    target = builder.target;
    reconnect = builder.reconnect;
    ManagedChannelBuilder<?> channelBuilder = Grpc.newChannelBuilder(target, builder.credentials)
        .maxInboundMessageSize(MAX_MESSAGE)
        .maxInboundMetadataSize(MAX_HEADERS)
        .keepAliveTime(30, TimeUnit.SECONDS)
        .keepAliveTimeout(10, TimeUnit.SECONDS)
        .keepAliveWithoutCalls(true)
        .disableRetry() // the rules of RunStream are the ones that know seq and request_id
        .disableServiceConfigLookUp();
    if (isLoopback(target)) {
      channelBuilder.proxyDetector(address -> null);
    }
    connection = channelBuilder.build();
    List<ClientInterceptor> interceptors = new ArrayList<>(); // the last one is asked first
    interceptors.add(watch);
    interceptors.addAll(builder.interceptors);
    interceptors.add(new CallSetup(builder.headers));
    channel = ClientInterceptors.intercept(connection, interceptors);
  }

  /**
   * Returns a builder of a client.
   *
   * @param target the engine's address, HOST:PORT or a name that gRPC can resolve, such as dns:///HOST:PORT
   * @throws IllegalArgumentException it is neither
   */
  public static Builder builder(String target) {
    return new Builder(target);
  }

  /** Returns a client of the engine at an address, without key or TLS. */
  public static EngineClient connect(String target) {
    return builder(target).build();
  }

  /**
   * Starts a run and returns its first segment as a stream, once the engine has accepted it. Without a request_id the
   * client makes one, so that a start whose answer got lost is not started twice.
   *
   * @throws EngineException the engine refuses it, or none answers
   */
  public RunStream run(RunRequest request) {
    RunRequest sent = request.getRequestId().isEmpty()
        ? request.toBuilder().setRequestId(newRequestId()).build() : request;
    return RunStream.open(this, new Start.OfRun(sent));
  }

  /** Runs a text: a new conversation with the engine's default agent. See {@link #run}. */
  public RunStream ask(String text) {
    return run(RunRequest.newBuilder().setMessage(userMessage(text)).build());
  }

  /**
   * Answers an interrupted run and returns its next segment as a stream.
   *
   * @throws EngineException the engine refuses it, or none answers
   */
  public RunStream resume(ResumeRequest request) {
    ResumeRequest sent = request.getRequestId().isEmpty()
        ? request.toBuilder().setRequestId(newRequestId()).build() : request;
    return RunStream.open(this, new Start.OfResume(sent));
  }

  /**
   * Follows a run: every event after {@code after_seq}, stored ones first. With {@code wait} it stays over parked
   * phases until the run is final.
   *
   * @throws EngineException the engine refuses it, or none answers
   */
  public RunStream attach(AttachRequest request) {
    return RunStream.open(this, new Start.OfAttach(request));
  }

  /** Asks a run to end. The answer may still say RUNNING; its stream tells the end. */
  public Run cancel(String runId, String why) {
    var request = CancelRequest.newBuilder().setRunId(runId).setReason(why).build();
    return unary(() -> engine().cancel(request)).getRun();
  }

  /** Returns a run. */
  public Run getRun(String runId) {
    var request = GetRunRequest.newBuilder().setRunId(runId).build();
    return unary(() -> engine().getRun(request)).getRun();
  }

  /** Returns the runs that fit the request's filters, newest first; pages are asked for as they are needed. */
  public Iterable<Run> runs(ListRunsRequest request) {
    return () -> new Pages(request);
  }

  /**
   * Returns the plain stub of the engine's service; it throws StatusRuntimeException. A unary call of it without a
   * deadline has one of 30 s.
   */
  public EngineServiceGrpc.EngineServiceBlockingStub engine() {
    return EngineServiceGrpc.newBlockingStub(channel);
  }

  /** Returns the plain stub of the conversations' service. */
  public ConversationServiceGrpc.ConversationServiceBlockingStub conversations() {
    return ConversationServiceGrpc.newBlockingStub(channel);
  }

  /** Returns the plain stub of the agents' service. */
  public AgentServiceGrpc.AgentServiceBlockingStub agents() {
    return AgentServiceGrpc.newBlockingStub(channel);
  }

  /** Returns the plain stub of the operators' service. */
  public OperatorServiceGrpc.OperatorServiceBlockingStub operators() {
    return OperatorServiceGrpc.newBlockingStub(channel);
  }

  /** Returns a message of a user with this text. */
  public static Message userMessage(String text) {
    return Message.newBuilder().setRole(Role.ROLE_USER)
        .addParts(ContentPart.newBuilder().setText(CanonicalArgs.wellFormed(text))).build();
  }

  /** Ends the connection and every call on it; streams that are read fail with a CancellationException. Runs go on. */
  @Override
  public void close() {
    closed = true;
    open.forEach(RunStream::leave);
    connection.shutdownNow();
    try {
      connection.awaitTermination(5, TimeUnit.SECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }

  Channel channel() {
    return channel;
  }

  String target() {
    return target;
  }

  Reconnect reconnect() {
    return reconnect;
  }

  /** Whether an engine has answered at the address, ever. */
  boolean reached() {
    return watch.reached();
  }

  boolean isConnected() {
    return connection.getState(false) == ConnectivityState.READY;
  }

  /** Lets the next call connect: the channel's own back-off grows to minutes and would hide an engine that is back. */
  void endBackOff() {
    connection.resetConnectBackoff();
  }

  void add(RunStream stream) {
    checkOpen();
    open.add(stream);
    if (closed) { // meanwhile, by another thread
      stream.leave();
    }
  }

  void remove(RunStream stream) {
    open.remove(stream);
  }

  int openStreams() {
    return open.size();
  }

  private void checkOpen() {
    if (closed) {
      throw new IllegalStateException("the client was closed");
    }
  }

  /** Returns what cuts calls off that were made in a context; null when nothing does. */
  RuntimeException cutOff(Context context) {
    Deadline deadline = context.getDeadline();
    if (deadline != null && deadline.isExpired() || context.cancellationCause() instanceof TimeoutException) {
      Throwable cause = context.cancellationCause();
      return EngineException.of("INTERNAL", "the deadline of the gRPC context has passed", Status.Code.DEADLINE_EXCEEDED,
          cause == null ? new TimeoutException("context timed out") : cause);
    }
    if (context.isCancelled()) {
      return cancellation("the gRPC context was cancelled", context.cancellationCause());
    }
    return closed ? cancellation("the client was closed", null) : null;
  }

  private static CancellationException cancellation(String text, Throwable cause) {
    CancellationException cancelled = new CancellationException(text);
    cancelled.initCause(cause);
    return cancelled;
  }

  private <T> T unary(Supplier<T> call) {
    checkOpen();
    try {
      return call.get();
    } catch (RuntimeException error) {
      RuntimeException cutOff = cutOff(Context.current());
      if (cutOff != null) {
        throw cutOff;
      }
      throw (error instanceof StatusRuntimeException refused
          ? Lost.judge(refused.getStatus(), refused.getTrailers(), target) : Lost.fault(error, target)).error();
    }
  }

  private static boolean isLoopback(String target) {
    return target.startsWith("127.") || target.startsWith("localhost:") || target.startsWith("[::1]:");
  }

  /** Returns a UUIDv7: unique, and sortable by the time it was made. */
  static String newRequestId() {
    long high = System.currentTimeMillis() << 16 | 0x7000 | RANDOM.nextInt(0x1000);
    long low = RANDOM.nextLong() & 0x3fffffffffffffffL | 0x8000000000000000L;
    return new UUID(high, low).toString();
  }

  /** The runs of a list over all its pages. */
  private final class Pages implements Iterator<Run> {
    private ListRunsRequest next;
    private Iterator<Run> page = List.<Run>of().iterator();

    Pages(ListRunsRequest first) {
      next = first;
    }

    @Override
    public boolean hasNext() {
      while (!page.hasNext() && next != null) {
        ListRunsRequest request = next;
        ListRunsResponse found = unary(() -> engine().listRuns(request));
        page = found.getRunsList().iterator();
        String token = found.getNextPageToken();
        next = token.isEmpty() ? null : request.toBuilder().setPageToken(token).build();
      }
      return page.hasNext();
    }

    @Override
    public Run next() {
      if (!hasNext()) {
        throw new NoSuchElementException();
      }
      return page.next();
    }
  }

  /** Builds a client. */
  public static final class Builder {
    private final String target;
    private final Map<String, Supplier<String>> headers = new HashMap<>();
    private final List<ClientInterceptor> interceptors = new ArrayList<>();
    private ChannelCredentials credentials = InsecureChannelCredentials.create();
    private Reconnect reconnect = Reconnect.DEFAULT;

    private Builder(String target) {
      this.target = Objects.requireNonNull(target, "target");
      if (!ADDRESS.matcher(target).matches()) {
        throw new IllegalArgumentException("the engine's address must be HOST:PORT, not \"" + target + "\"");
      }
    }

    /**
     * Sends an API key or JWT with every call.
     *
     * @throws IllegalArgumentException it cannot be in a header
     */
    public Builder token(String token) {
      return header("authorization", "Bearer " + CallSetup.checked("token", token));
    }

    /**
     * Sends an API key or JWT with every call, asked for at each on the thread that makes it. What the supplier throws
     * is the cause of the EngineException of that call; a stream that is taken up again asks again.
     */
    public Builder token(Supplier<String> token) {
      Objects.requireNonNull(token, "token");
      headers.put("authorization", () -> "Bearer " + CallSetup.checked("token", token.get()));
      return this;
    }

    /** Acts for somebody else; only the role service may. */
    public Builder actingFor(String tenant, String subject) {
      return header("dualclaw-tenant", CallSetup.checked("tenant", tenant))
          .header("dualclaw-subject", CallSetup.checked("subject", subject));
    }

    /** Encrypts the connection, as with {@code TlsChannelCredentials.create()}. */
    public Builder credentials(ChannelCredentials credentials) {
      this.credentials = Objects.requireNonNull(credentials, "credentials");
      return this;
    }

    /** Changes how lost streams are taken up again. */
    public Builder reconnect(Reconnect reconnect) {
      this.reconnect = Objects.requireNonNull(reconnect, "reconnect");
      return this;
    }

    /** Adds an interceptor of gRPC, for tracing and the like. */
    public Builder intercept(ClientInterceptor interceptor) {
      interceptors.add(Objects.requireNonNull(interceptor, "interceptor"));
      return this;
    }

    /** Returns the client. */
    public EngineClient build() {
      return new EngineClient(this);
    }

    private Builder header(String name, String value) {
      headers.put(name, () -> value);
      return this;
    }
  }
}
