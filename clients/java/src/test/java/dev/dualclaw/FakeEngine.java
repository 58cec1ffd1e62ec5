package dev.dualclaw;

import com.google.protobuf.Any;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import dev.dualclaw.v1.AttachRequest;
import dev.dualclaw.v1.AttachResponse;
import dev.dualclaw.v1.Delta;
import dev.dualclaw.v1.Done;
import dev.dualclaw.v1.EngineEvent;
import dev.dualclaw.v1.EngineServiceGrpc;
import dev.dualclaw.v1.GetRunRequest;
import dev.dualclaw.v1.GetRunResponse;
import dev.dualclaw.v1.RunRequest;
import dev.dualclaw.v1.RunResponse;
import io.grpc.ForwardingServerCall.SimpleForwardingServerCall;
import io.grpc.ForwardingServerCallListener.SimpleForwardingServerCallListener;
import io.grpc.InsecureServerCredentials;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerCredentials;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Deque;
import java.util.List;
import java.util.concurrent.ConcurrentLinkedDeque;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import java.util.function.Consumer;

/** Plays one script per call, in order, over a real socket: events are sent, an error ends the call. */
final class FakeEngine extends EngineServiceGrpc.EngineServiceImplBase implements AutoCloseable {
  /** Leaves the call open. */
  static final Object HANG = "hang";
  static final StatusRuntimeException BROKEN =
      Status.UNAVAILABLE.withDescription("the connection broke").asRuntimeException();
  /** Quick attempts, and patience beyond what a test may wait for. */
  static final Reconnect QUICK = new Reconnect(Duration.ofMinutes(1), Duration.ofMillis(1), Duration.ofMillis(50));
  /** Waits that no test has time for: whoever waits must be told to leave. */
  static final Reconnect SLOW = new Reconnect(Duration.ofDays(1), Duration.ofHours(1), Duration.ofHours(1));

  final List<RunRequest> runs = Collections.synchronizedList(new ArrayList<>());
  final List<AttachRequest> attaches = Collections.synchronizedList(new ArrayList<>());
  /** Headers of the calls, in order. */
  final List<Metadata> calls = Collections.synchronizedList(new ArrayList<>());
  /** One permit for each call that its client has left. */
  final Semaphore left = new Semaphore(0);
  volatile boolean headers = true;
  private final Deque<List<Object>> scripts = new ConcurrentLinkedDeque<>();
  private final Server server;
  private final int port;

  FakeEngine(int port, ServerCredentials credentials) throws IOException {
    server = NettyServerBuilder.forAddress(new InetSocketAddress("127.0.0.1", port), credentials)
        .addService(this).intercept(new Watch()).build().start();
    this.port = server.getPort();
  }

  /** Starts one on a free port. */
  static FakeEngine serve(Object[]... played) throws IOException {
    return serveAt(0, played);
  }

  static FakeEngine serveAt(int port, Object[]... played) throws IOException {
    return new FakeEngine(port, InsecureServerCredentials.create()).play(played);
  }

  FakeEngine play(Object[]... played) {
    for (Object[] script : played) {
      scripts.add(List.of(script));
    }
    return this;
  }

  /** Drops the scripts that were not played. */
  void forget() {
    scripts.clear();
  }

  int port() {
    return port;
  }

  EngineClient.Builder builder() {
    return EngineClient.builder("127.0.0.1:" + port()).reconnect(QUICK);
  }

  EngineClient client() {
    return builder().build();
  }

  @Override
  public void close() {
    server.shutdownNow();
    try {
      server.awaitTermination(60, TimeUnit.SECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }

  /** A port where nobody listens. */
  static int freePort() throws IOException {
    try (ServerSocket free = new ServerSocket(0)) {
      return free.getLocalPort();
    }
  }

  /** Waits for something that happens by itself; the test's own time limit bounds it. */
  static void until(BooleanSupplier happened) throws InterruptedException {
    while (!happened.getAsBoolean()) {
      Thread.sleep(5);
    }
  }

  static Object[] script(Object... steps) {
    return steps;
  }

  static EngineEvent delta(int seq) {
    return EngineEvent.newBuilder().setSeq(seq).setRunId("r").setDelta(Delta.newBuilder().setContent("x")).build();
  }

  static EngineEvent done(int seq) {
    return EngineEvent.newBuilder().setSeq(seq).setRunId("r").setDone(Done.getDefaultInstance()).build();
  }

  static List<Integer> seqs(RunStream stream) {
    return Fold.collect(stream).stream().map(EngineEvent::getSeq).toList();
  }

  static StatusRuntimeException refusal(Status.Code code, String reason) {
    return StatusProto.toStatusRuntimeException(com.google.rpc.Status.newBuilder().setCode(code.value())
        .addDetails(Any.pack(ErrorInfo.newBuilder().setDomain("dualclaw").setReason(reason)
            .putMetadata("run_id", "r").build()))
        .addDetails(Any.pack(BadRequest.newBuilder().addFieldViolations(
            BadRequest.FieldViolation.newBuilder().setField("f").setDescription("d")).build()))
        .addDetails(Any.pack(RetryInfo.newBuilder().setRetryDelay(
            com.google.protobuf.Duration.newBuilder().setSeconds(2)).build()))
        .build());
  }

  @Override
  public void run(RunRequest request, StreamObserver<RunResponse> answer) {
    runs.add(request);
    play(events -> answer.onNext(RunResponse.newBuilder().addAllEvents(events).build()), answer);
  }

  @Override
  public void attach(AttachRequest request, StreamObserver<AttachResponse> answer) {
    attaches.add(request);
    play(events -> answer.onNext(AttachResponse.newBuilder().addAllEvents(events).build()), answer);
  }

  @Override
  public void getRun(GetRunRequest request, StreamObserver<GetRunResponse> answer) {
    answer.onNext(GetRunResponse.getDefaultInstance());
    answer.onCompleted();
  }

  private void play(Consumer<List<EngineEvent>> send, StreamObserver<?> answer) {
    List<Object> script = scripts.poll();
    for (Object step : script == null ? List.<Object>of(Status.INTERNAL.asRuntimeException()) : script) {
      if (step instanceof StatusRuntimeException error) {
        answer.onError(error);
        return;
      } else if (step instanceof EngineEvent event) {
        send.accept(List.of(event));
      } else if (step instanceof EngineEvent[] events) {
        send.accept(List.of(events));
      } else if (step == HANG) {
        return;
      }
    }
    answer.onCompleted();
  }

  private final class Watch implements ServerInterceptor {
    @Override
    public <Q, R> ServerCall.Listener<Q> interceptCall(
        ServerCall<Q, R> call, Metadata request, ServerCallHandler<Q, R> next) {
      calls.add(request);
      var answering = new SimpleForwardingServerCall<>(call) {
        @Override
        public void sendHeaders(Metadata sent) {
          if (headers) {
            sent.put(Metadata.Key.of("dualclaw-run-id", Metadata.ASCII_STRING_MARSHALLER), "r");
            sent.put(Metadata.Key.of("dualclaw-conversation-id", Metadata.ASCII_STRING_MARSHALLER), "c");
          }
          super.sendHeaders(sent);
        }
      };
      return new SimpleForwardingServerCallListener<>(next.startCall(answering, request)) {
        @Override
        public void onCancel() {
          left.release();
          super.onCancel();
        }
      };
    }
  }
}
