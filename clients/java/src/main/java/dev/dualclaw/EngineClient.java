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
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.MetadataUtils;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.Objects;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/**
 * A connection to one engine; safe for any number of threads. It connects with the first call. Closing it ends every
 * call that is open, and no run.
 */
public final class EngineClient implements AutoCloseable {
  private static final int MAX_MESSAGE = 64 * 1024 * 1024;
  private static final Duration UNARY_TIMEOUT = Duration.ofSeconds(30);
  private static final SecureRandom RANDOM = new SecureRandom();

  private final ManagedChannel connection;
  private final Channel channel;
  private final String target;
  private final Reconnect reconnect;

  private EngineClient(Builder builder) {
    target = builder.target;
    reconnect = builder.reconnect;
    ManagedChannelBuilder<?> channelBuilder = Grpc.newChannelBuilder(target, builder.credentials)
        .maxInboundMessageSize(MAX_MESSAGE)
        .keepAliveTime(30, TimeUnit.SECONDS)
        .keepAliveTimeout(10, TimeUnit.SECONDS)
        .keepAliveWithoutCalls(true)
        .disableRetry() // the rules of RunStream are the ones that know seq and request_id
        .disableServiceConfigLookUp();
    if (isLoopback(target)) {
      channelBuilder.proxyDetector(address -> null);
    }
    connection = channelBuilder.build();
    List<ClientInterceptor> interceptors = new ArrayList<>(builder.interceptors);
    interceptors.add(MetadataUtils.newAttachHeadersInterceptor(builder.headers));
    channel = ClientInterceptors.intercept(connection, interceptors);
  }

  /**
   * Returns a builder of a client.
   *
   * @param target the engine's address, HOST:PORT or any name gRPC can resolve
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

  /** Returns the plain stub of the engine's service; it throws StatusRuntimeException. */
  public EngineServiceGrpc.EngineServiceBlockingStub engine() {
    return EngineServiceGrpc.newBlockingStub(channel).withDeadlineAfter(UNARY_TIMEOUT);
  }

  /** Returns the plain stub of the conversations' service. */
  public ConversationServiceGrpc.ConversationServiceBlockingStub conversations() {
    return ConversationServiceGrpc.newBlockingStub(channel).withDeadlineAfter(UNARY_TIMEOUT);
  }

  /** Returns the plain stub of the agents' service. */
  public AgentServiceGrpc.AgentServiceBlockingStub agents() {
    return AgentServiceGrpc.newBlockingStub(channel).withDeadlineAfter(UNARY_TIMEOUT);
  }

  /** Returns the plain stub of the operators' service. */
  public OperatorServiceGrpc.OperatorServiceBlockingStub operators() {
    return OperatorServiceGrpc.newBlockingStub(channel).withDeadlineAfter(UNARY_TIMEOUT);
  }

  /** Returns a message of a user with this text. */
  public static Message userMessage(String text) {
    return Message.newBuilder().setRole(Role.ROLE_USER).addParts(ContentPart.newBuilder().setText(text)).build();
  }

  @Override
  public void close() {
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

  private <T> T unary(Supplier<T> call) {
    try {
      return call.get();
    } catch (StatusRuntimeException error) {
      throw Lost.judge(error.getStatus(), error.getTrailers(), this).error();
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
    private final Metadata headers = new Metadata();
    private final List<ClientInterceptor> interceptors = new ArrayList<>();
    private ChannelCredentials credentials = InsecureChannelCredentials.create();
    private Reconnect reconnect = Reconnect.DEFAULT;

    private Builder(String target) {
      this.target = Objects.requireNonNull(target);
      if (target.isBlank()) {
        throw new IllegalArgumentException("the engine's address is empty; give HOST:PORT");
      }
    }

    /** Sends an API key or JWT with every call. */
    public Builder token(String token) {
      return header("authorization", "Bearer " + token);
    }

    /** Acts for somebody else; only the role service may. */
    public Builder actingFor(String tenant, String subject) {
      return header("dualclaw-tenant", tenant).header("dualclaw-subject", subject);
    }

    /** Encrypts the connection, as with {@code TlsChannelCredentials.create()}. */
    public Builder credentials(ChannelCredentials credentials) {
      this.credentials = credentials;
      return this;
    }

    /** Changes how lost streams are taken up again. */
    public Builder reconnect(Reconnect reconnect) {
      this.reconnect = reconnect;
      return this;
    }

    /** Adds an interceptor of gRPC, for tracing and the like. */
    public Builder intercept(ClientInterceptor interceptor) {
      interceptors.add(interceptor);
      return this;
    }

    /** Returns the client. */
    public EngineClient build() {
      return new EngineClient(this);
    }

    private Builder header(String name, String value) {
      headers.put(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER), value);
      return this;
    }
  }
}
