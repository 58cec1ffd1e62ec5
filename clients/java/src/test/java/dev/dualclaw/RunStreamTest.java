package dev.dualclaw;

import static dev.dualclaw.FakeEngine.BROKEN;
import static dev.dualclaw.FakeEngine.HANG;
import static dev.dualclaw.FakeEngine.delta;
import static dev.dualclaw.FakeEngine.done;
import static dev.dualclaw.FakeEngine.refusal;
import static dev.dualclaw.FakeEngine.script;
import static dev.dualclaw.FakeEngine.seqs;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import dev.dualclaw.v1.AttachRequest;
import dev.dualclaw.v1.EngineEvent;
import dev.dualclaw.v1.RunRequest;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.io.IOException;
import java.net.ServerSocket;
import java.time.Duration;
import java.time.temporal.ChronoUnit;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** A stream over lost connections: nothing is lost or doubled, and what cannot be mended fails. */
@Timeout(value = 120, unit = TimeUnit.SECONDS)
class RunStreamTest {
  private FakeEngine fake;
  private EngineClient client;

  private void serve(Object[]... played) throws IOException {
    fake = FakeEngine.serve(played);
    client = fake.client();
  }

  @AfterEach
  void stop() {
    if (fake != null) {
      client.close();
      fake.close();
    }
  }

  @Test
  void isTakenUpAgainAfterTheLastEventSeen() throws IOException {
    serve(script(delta(1), delta(2), BROKEN), script(BROKEN),
        script(new EngineEvent[] {delta(2), delta(3)}, BROKEN), script(done(4)));
    RunStream stream = client.ask("hi");
    assertEquals(List.of(1, 2, 3, 4), seqs(stream));
    assertEquals(List.of(2, 2, 3), fake.attaches.stream().map(AttachRequest::getAfterSeq).toList());
    assertEquals(List.of("r", "c", 4, 2),
        List.of(stream.runId(), stream.conversationId(), stream.lastSeq(), stream.reconnects()));
  }

  @Test
  void startIsSentAgainWithItsRequestId() throws IOException {
    serve(script(BROKEN), script(delta(1), done(2)));
    assertEquals(List.of(1, 2), seqs(client.ask("hi")));
    assertEquals(2, fake.runs.size());
    assertTrue(fake.runs.get(0).getRequestId().matches("[0-9a-f]{8}-[0-9a-f]{4}-7.*"));
    assertEquals(fake.runs.get(0).getRequestId(), fake.runs.get(1).getRequestId());
  }

  @Test
  void gapIsFilledFromTheLog() throws IOException {
    serve(script(delta(1), delta(3)), script(delta(2), delta(3), done(4)));
    assertEquals(List.of(1, 2, 3, 4), seqs(client.ask("hi")));
    assertEquals(1, fake.attaches.get(0).getAfterSeq());
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

  @Test
  void refusalsAreTypedAndFinal() throws IOException {
    serve(script(refusal(Status.Code.FAILED_PRECONDITION, "CONVERSATION_BUSY")), script(done(1)));
    EngineException refused = assertThrows(EngineException.class, () -> client.ask("hi"));
    assertEquals("CONVERSATION_BUSY", refused.reason());
    assertEquals("r", refused.metadata().get("run_id"));
    assertEquals("d", refused.fields().get("f"));
    assertEquals(Duration.ofSeconds(2), refused.retryAfter().orElseThrow());
    assertEquals(Status.Code.FAILED_PRECONDITION, refused.code());
    assertEquals(1, fake.runs.size());
  }

  @Test
  void enginesWithoutHeadersAreUnderstood() throws IOException {
    serve(script(delta(1), BROKEN), script(done(2)), script(refusal(Status.Code.OUT_OF_RANGE, "AFTER_SEQ_OUT_OF_RANGE")));
    fake.headers = false;
    RunStream stream = client.ask("hi");
    assertEquals(List.of(1, 2), seqs(stream));
    assertEquals("r", stream.runId());
    AttachRequest beyond = AttachRequest.newBuilder().setRunId("r").setAfterSeq(9).build();
    assertEquals("AFTER_SEQ_OUT_OF_RANGE", assertThrows(EngineException.class, () -> client.attach(beyond)).reason());
  }

  @Test
  void givesUpInTheEndAndSaysWhereItStood() throws IOException {
    fake = FakeEngine.serve(script(delta(1), BROKEN));
    client = fake.builder().reconnect(FakeEngine.QUICK.withTotal(Duration.ofMillis(500))).build();
    for (int i = 0; i < 3000; i++) {
      fake.play(script(BROKEN));
    }
    RunStream stream = client.ask("hi");
    EngineException lost = assertThrows(EngineException.class, () -> seqs(stream));
    assertTrue(lost.isUnreachable());
    assertTrue(lost.getMessage().contains("run r, after event 1"), lost.getMessage());
  }

  @Test
  void theCallersRequestIsLeftAsItIs() throws IOException {
    serve(script(done(1)), script(done(1)));
    RunRequest request = RunRequest.getDefaultInstance();
    seqs(client.run(request));
    seqs(client.run(request));
    assertEquals("", request.getRequestId());
    assertEquals(2, fake.runs.stream().map(RunRequest::getRequestId).distinct().count());
  }

  @Test
  void itIsReadOnce() throws IOException {
    serve(script(delta(1), done(2)));
    RunStream stream = client.ask("hi");
    seqs(stream);
    String told = assertThrows(IllegalStateException.class, stream::iterator).getMessage();
    assertTrue(told.contains("attach"), told);
  }

  /** A hundred of them, because a wait for each is what would go wrong. */
  @Test
  void theEndOfAnAttachIsNotWaitedForTwice() throws IOException {
    serve();
    for (int i = 0; i < 100; i++) {
      fake.play(script());
      assertEquals(List.of(), seqs(client.attach(AttachRequest.newBuilder().setRunId("r").setAfterSeq(7).build())));
    }
  }

  @Test
  void attachToASilentRunOfAnEngineWithoutHeadersIsOpen() throws IOException {
    serve(script(HANG));
    fake.headers = false;
    try (RunStream stream = client.attach(AttachRequest.newBuilder().setRunId("r").setAfterSeq(7).build())) {
      assertEquals("r", stream.runId());
    }
    assertEquals(1, fake.attaches.size());
  }

  @Test
  void withoutHeadersAStreamThatIsTakenUpAgainGoesOnAndEnds() throws IOException {
    serve(script(delta(8), BROKEN), script(delta(9), BROKEN), script());
    fake.headers = false;
    AttachRequest request = AttachRequest.newBuilder().setRunId("r").setAfterSeq(7).build();
    assertEquals(List.of(8, 9), seqs(client.attach(request)));
  }

  @Test
  void longRefusalsInAnyScriptArriveWhole() throws IOException {
    String text = "你".repeat(1300); // near 4 kB, and three times that in a header
    StatusRuntimeException refused = StatusProto.toStatusRuntimeException(com.google.rpc.Status.newBuilder()
        .setCode(Status.Code.INVALID_ARGUMENT.value()).setMessage(text)
        .addDetails(Any.pack(ErrorInfo.newBuilder().setDomain("dualclaw").setReason("INVALID_REQUEST").build())).build());
    serve(script(refused));
    EngineException error = assertThrows(EngineException.class, () -> client.ask("hi"));
    assertEquals(List.of("INVALID_REQUEST", text), List.of(error.reason(), error.getMessage()));
  }

  @Test
  void brokenDetailsOfAForeignServerAreNoFaultOfTheirOwn() throws IOException {
    Metadata torn = new Metadata();
    torn.put(Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER), new byte[] {(byte) 0xff, 1});
    Metadata other = new Metadata();
    other.put(Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER),
        com.google.rpc.Status.newBuilder().setCode(5).build().toByteArray());
    for (Metadata trailers : List.of(torn, other)) {
      stop();
      serve(script(Status.PERMISSION_DENIED.withDescription("no").asRuntimeException(trailers)));
      EngineException error = assertThrows(EngineException.class, () -> client.ask("hi"));
      assertEquals(List.of("PERMISSION_DENIED", "no"), List.of(error.reason(), error.getMessage()));
    }
  }

  @Test
  void absurdDelaysAreEndless() throws IOException {
    StatusRuntimeException absurd = StatusProto.toStatusRuntimeException(com.google.rpc.Status.newBuilder()
        .setCode(Status.Code.UNAVAILABLE.value())
        .addDetails(Any.pack(RetryInfo.newBuilder().setRetryDelay(com.google.protobuf.Duration.newBuilder()
            .setSeconds(Long.MAX_VALUE).setNanos(Integer.MAX_VALUE)).build())).build());
    fake = FakeEngine.serve(script(delta(1), absurd), script(absurd));
    client = fake.builder().reconnect(FakeEngine.QUICK.withTotal(Duration.ofMillis(500))).build();
    RunStream stream = client.ask("hi");
    assertTrue(assertThrows(EngineException.class, () -> seqs(stream)).isUnreachable());
  }

  @Test
  void waitsOfAnyLengthAreTaken() throws IOException {
    Duration forever = ChronoUnit.FOREVER.getDuration();
    fake = FakeEngine.serve(script(delta(1), BROKEN), script(BROKEN), script(done(2)));
    client = fake.builder().reconnect(FakeEngine.QUICK.withTotal(forever).withStart(forever)).build();
    assertEquals(List.of(1, 2), seqs(client.ask("hi")));
    assertThrows(IllegalArgumentException.class, () -> FakeEngine.QUICK.withFirst(Duration.ofMillis(-1)));
    assertThrows(NullPointerException.class, () -> FakeEngine.QUICK.withLongest(null));
  }

  /** The channel of gRPC has a back-off of its own, 1 s growing to minutes, that would hide an engine that is back. */
  @Test
  void everyAttemptConnects() throws Exception {
    AtomicInteger connections = new AtomicInteger();
    try (ServerSocket gone = new ServerSocket(0)) {
      Thread closing = new Thread(() -> {
        try {
          while (true) {
            gone.accept().close();
            connections.incrementAndGet();
          }
        } catch (IOException over) {
          return;
        }
      });
      closing.start();
      Reconnect endless = FakeEngine.QUICK.withTotal(Duration.ofDays(1)).withStart(Duration.ofDays(1));
      try (EngineClient patient = EngineClient.builder("127.0.0.1:" + gone.getLocalPort()).reconnect(endless).build()) {
        CompletableFuture<RunStream> asking = CompletableFuture.supplyAsync(() -> patient.ask("hi"));
        FakeEngine.until(() -> connections.get() > 20); // the back-off of gRPC would take many minutes for so many
        patient.close();
        assertThrows(ExecutionException.class, () -> asking.get(60, TimeUnit.SECONDS));
      }
    }
  }
}
