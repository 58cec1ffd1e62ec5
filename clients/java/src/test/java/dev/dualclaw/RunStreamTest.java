package dev.dualclaw;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

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
import dev.dualclaw.v1.RunRequest;
import dev.dualclaw.v1.RunResponse;
import io.grpc.ForwardingServerCall.SimpleForwardingServerCall;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
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
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Deque;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.CancellationException;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(value = 30, unit = TimeUnit.SECONDS)
class RunStreamTest {
  private static final Object HANG = "hang";
  private static final StatusRuntimeException BROKEN =
      Status.UNAVAILABLE.withDescription("the connection broke").asRuntimeException();

  private final List<RunRequest> runs = Collections.synchronizedList(new ArrayList<>());
  private final List<AttachRequest> attaches = Collections.synchronizedList(new ArrayList<>());
  private final Deque<List<Object>> scripts = new ArrayDeque<>();
  private boolean headers = true;
  private Server server;
  private EngineClient client;

  /** Plays one script per call, in order, over a real socket: events are sent, an error ends the call. */
  private final class FakeEngine extends EngineServiceGrpc.EngineServiceImplBase {
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
  }

  private final class WithHeaders implements ServerInterceptor {
    @Override
    public <Q, R> ServerCall.Listener<Q> interceptCall(
        ServerCall<Q, R> call, Metadata request, ServerCallHandler<Q, R> next) {
      return next.startCall(new SimpleForwardingServerCall<>(call) {
        @Override
        public void sendHeaders(Metadata sent) {
          if (headers) {
            sent.put(Metadata.Key.of("dualclaw-run-id", Metadata.ASCII_STRING_MARSHALLER), "r");
            sent.put(Metadata.Key.of("dualclaw-conversation-id", Metadata.ASCII_STRING_MARSHALLER), "c");
          }
          super.sendHeaders(sent);
        }
      }, request);
    }
  }

  private EngineClient serve(Object[]... played) throws IOException {
    for (Object[] script : played) {
      scripts.add(List.of(script));
    }
    server = NettyServerBuilder.forAddress(new InetSocketAddress("127.0.0.1", 0)).addService(new FakeEngine())
        .intercept(new WithHeaders()).build().start();
    client = EngineClient.builder("127.0.0.1:" + server.getPort())
        .reconnect(new Reconnect(Duration.ofSeconds(3), Duration.ofMillis(1), Duration.ofMillis(50))).build();
    return client;
  }

  @AfterEach
  void stop() {
    if (client != null) {
      client.close();
      server.shutdownNow();
    }
  }

  private static Object[] script(Object... steps) {
    return steps;
  }

  private static EngineEvent delta(int seq) {
    return EngineEvent.newBuilder().setSeq(seq).setRunId("r").setDelta(Delta.newBuilder().setContent("x")).build();
  }

  private static EngineEvent done(int seq) {
    return EngineEvent.newBuilder().setSeq(seq).setRunId("r").setDone(Done.getDefaultInstance()).build();
  }

  private static List<Integer> seqs(RunStream stream) {
    return Fold.collect(stream).stream().map(EngineEvent::getSeq).toList();
  }

  @Test
  void isTakenUpAgainAfterTheLastEventSeen() throws IOException {
    serve(script(delta(1), delta(2), BROKEN), script(BROKEN),
        script(new EngineEvent[] {delta(2), delta(3)}, BROKEN), script(done(4)));
    RunStream stream = client.ask("hi");
    assertEquals(List.of(1, 2, 3, 4), seqs(stream));
    assertEquals(List.of(2, 2, 3), attaches.stream().map(AttachRequest::getAfterSeq).toList());
    assertEquals(List.of("r", "c", 4, 2),
        List.of(stream.runId(), stream.conversationId(), stream.lastSeq(), stream.reconnects()));
  }

  @Test
  void startIsSentAgainWithItsRequestId() throws IOException {
    serve(script(BROKEN), script(delta(1), done(2)));
    assertEquals(List.of(1, 2), seqs(client.ask("hi")));
    assertEquals(2, runs.size());
    assertTrue(runs.get(0).getRequestId().matches("[0-9a-f]{8}-[0-9a-f]{4}-7.*"));
    assertEquals(runs.get(0).getRequestId(), runs.get(1).getRequestId());
  }

  @Test
  void gapIsFilledFromTheLog() throws IOException {
    serve(script(delta(1), delta(3)), script(delta(2), delta(3), done(4)));
    assertEquals(List.of(1, 2, 3, 4), seqs(client.ask("hi")));
    assertEquals(1, attaches.get(0).getAfterSeq());
  }

  @Test
  void earlyEndIsNotTakenForTheEnd() throws IOException {
    serve(script(delta(1)), script(delta(2)), script(done(3)));
    assertEquals(List.of(1, 2, 3), seqs(client.ask("hi")));
  }

  @Test
  void failsWhenTheSamePlaceIsSpoiltTwice() throws IOException {
    serve(script(delta(1)), script(), script());
    RunStream stream = client.ask("hi");
    assertEquals("INTERNAL", assertThrows(EngineException.class, () -> seqs(stream)).reason());
  }

  private static StatusRuntimeException refusal(Status.Code code, String reason) {
    return StatusProto.toStatusRuntimeException(com.google.rpc.Status.newBuilder().setCode(code.value())
        .addDetails(Any.pack(ErrorInfo.newBuilder().setDomain("dualclaw").setReason(reason)
            .putMetadata("run_id", "r").build()))
        .addDetails(Any.pack(BadRequest.newBuilder().addFieldViolations(
            BadRequest.FieldViolation.newBuilder().setField("f").setDescription("d")).build()))
        .addDetails(Any.pack(RetryInfo.newBuilder().setRetryDelay(
            com.google.protobuf.Duration.newBuilder().setSeconds(2)).build()))
        .build());
  }

  @Test
  void refusalsAreTypedAndFinal() throws IOException {
    serve(script(refusal(Status.Code.FAILED_PRECONDITION, "CONVERSATION_BUSY")), script(done(1)));
    EngineException refused = assertThrows(EngineException.class, () -> client.ask("hi"));
    assertEquals("CONVERSATION_BUSY", refused.reason());
    assertEquals("r", refused.metadata().get("run_id"));
    assertEquals("d", refused.fields().get("f"));
    assertEquals(Duration.ofSeconds(2), refused.retryAfter().orElseThrow());
    assertEquals(Status.Code.FAILED_PRECONDITION, refused.code());
    assertEquals(1, runs.size());
  }

  @Test
  void enginesWithoutHeadersAreUnderstood() throws IOException {
    headers = false;
    serve(script(delta(1), BROKEN), script(done(2)), script(refusal(Status.Code.OUT_OF_RANGE, "AFTER_SEQ_OUT_OF_RANGE")));
    RunStream stream = client.ask("hi");
    assertEquals(List.of(1, 2), seqs(stream));
    assertEquals("r", stream.runId());
    AttachRequest beyond = AttachRequest.newBuilder().setRunId("r").setAfterSeq(9).build();
    assertEquals("AFTER_SEQ_OUT_OF_RANGE", assertThrows(EngineException.class, () -> client.attach(beyond)).reason());
  }

  @Test
  void closedByAnotherThreadItEnds() throws Exception {
    serve(script(delta(1), HANG));
    RunStream stream = client.ask("hi");
    Iterator<EngineEvent> events = stream.iterator();
    assertEquals(1, events.next().getSeq());
    Thread closing = new Thread(stream::close);
    closing.start();
    assertFalse(events.hasNext());
    closing.join();
    assertEquals(List.of(), attaches);
  }

  @Test
  void interruptedItIsCancelledAndTheFlagKept() throws Exception {
    serve(script(delta(1), HANG));
    RunStream stream = client.ask("hi");
    Iterator<EngineEvent> events = stream.iterator();
    events.next();
    Thread.currentThread().interrupt();
    assertThrows(CancellationException.class, events::hasNext);
    assertTrue(Thread.interrupted());
  }

  @Test
  void givesUpInTheEndAndSaysWhereItStood() throws IOException {
    serve(script(delta(1), BROKEN));
    for (int i = 0; i < 3000; i++) {
      scripts.add(List.of(BROKEN));
    }
    RunStream stream = client.ask("hi");
    EngineException lost = assertThrows(EngineException.class, () -> seqs(stream));
    assertTrue(lost.isUnreachable());
    assertTrue(lost.getMessage().contains("run r, after event 1"), lost.getMessage());
  }

  @Test
  void toNobodyItFailsAtOnce() throws IOException {
    int port;
    try (ServerSocket free = new ServerSocket(0)) {
      port = free.getLocalPort();
    }
    try (EngineClient lonely = EngineClient.connect("127.0.0.1:" + port)) {
      EngineException refused = assertThrows(EngineException.class, () -> lonely.ask("hi"));
      assertTrue(refused.isUnreachable());
      assertTrue(refused.getMessage().contains("no engine answers"), refused.getMessage());
    }
  }
}
