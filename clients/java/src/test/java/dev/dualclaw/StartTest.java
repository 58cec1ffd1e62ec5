package dev.dualclaw;

import static dev.dualclaw.FakeEngine.BROKEN;
import static dev.dualclaw.FakeEngine.SLOW;
import static dev.dualclaw.FakeEngine.delta;
import static dev.dualclaw.FakeEngine.done;
import static dev.dualclaw.FakeEngine.freePort;
import static dev.dualclaw.FakeEngine.script;
import static dev.dualclaw.FakeEngine.seqs;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.dualclaw.v1.GetRunRequest;
import io.grpc.CallCredentials;
import io.grpc.Deadline;
import io.grpc.Metadata;
import io.grpc.TlsChannelCredentials;
import io.grpc.TlsServerCredentials;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.net.ServerSocket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import javax.net.ssl.KeyManagerFactory;
import javax.net.ssl.TrustManagerFactory;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** Starts: which of them wait for their engine, and which fail at once. */
@Timeout(value = 120, unit = TimeUnit.SECONDS)
class StartTest {
  private final List<AutoCloseable> open = new ArrayList<>();

  private <T extends AutoCloseable> T closing(T made) {
    open.add(0, made);
    return made;
  }

  @AfterEach
  void stop() throws Exception {
    for (AutoCloseable made : open) {
      made.close();
    }
  }

  private static EngineException refused(EngineClient client) {
    return assertThrows(EngineException.class, () -> client.ask("hi"));
  }

  private static void assertNobodyAnswers(EngineClient client) {
    EngineException refused = refused(client);
    assertTrue(refused.isUnreachable());
    assertTrue(refused.getMessage().contains("no engine answers"), refused.getMessage());
  }

  @Test
  void toNobodyFailsAtOnce() throws IOException {
    assertNobodyAnswers(closing(EngineClient.builder("127.0.0.1:" + freePort()).reconnect(SLOW).build()));
  }

  @Test
  void waitsForAnEngineThatWasThereBefore() throws Exception {
    FakeEngine before = closing(FakeEngine.serve(script(done(1))));
    EngineClient client =
        closing(before.builder().reconnect(FakeEngine.QUICK).build());
    seqs(client.ask("hi"));
    before.close();
    CompletableFuture<List<Integer>> starting = CompletableFuture.supplyAsync(() -> seqs(client.ask("again")));
    Thread.sleep(100);
    assertFalse(starting.isDone());
    FakeEngine after = closing(FakeEngine.serveAt(before.port(), script(done(1))));
    assertEquals(List.of(1), starting.get(60, TimeUnit.SECONDS));
    assertEquals(1, after.runs.size());
  }

  @Test
  void anyAnswerOfAnEngineShowsThatItIsThere() throws Exception {
    FakeEngine before = closing(FakeEngine.serve());
    EngineClient client =
        closing(before.builder().reconnect(FakeEngine.QUICK).build());
    client.getRun("r");
    before.close();
    CompletableFuture<List<Integer>> starting = CompletableFuture.supplyAsync(() -> seqs(client.ask("hi")));
    Thread.sleep(100);
    closing(FakeEngine.serveAt(before.port(), script(done(1))));
    assertEquals(List.of(1), starting.get(60, TimeUnit.SECONDS));
  }

  @Test
  void aStreamThatIsOpenShowsThatItIsThere() throws Exception {
    FakeEngine before = closing(FakeEngine.serve(script(delta(1), FakeEngine.HANG)));
    EngineClient client =
        closing(before.builder().reconnect(FakeEngine.QUICK).build());
    client.ask("hi");
    before.close();
    CompletableFuture<List<Integer>> starting = CompletableFuture.supplyAsync(() -> seqs(client.ask("again")));
    Thread.sleep(100);
    closing(FakeEngine.serveAt(before.port(), script(done(1))));
    assertEquals(List.of(1), starting.get(60, TimeUnit.SECONDS));
  }

  @Test
  void waitsNoLongerThanStartAndNotAtAllWithZero() throws IOException {
    for (Duration start : List.of(Duration.ZERO, Duration.ofMillis(200))) {
      FakeEngine fake = closing(FakeEngine.serve(script(done(1))));
      EngineClient client = closing(fake.builder()
          .reconnect(FakeEngine.QUICK.withTotal(Duration.ofDays(1)).withStart(start)).build());
      seqs(client.ask("hi"));
      fake.close();
      assertNobodyAnswers(client);
    }
  }

  @Test
  void waitsForAnEngineThatWasNeverThereWhenStartSaysSo() throws Exception {
    int port = freePort();
    EngineClient client = closing(EngineClient.builder("127.0.0.1:" + port)
        .reconnect(FakeEngine.QUICK.withStart(Duration.ofMinutes(1))).build());
    CompletableFuture<List<Integer>> starting = CompletableFuture.supplyAsync(() -> seqs(client.ask("hi")));
    Thread.sleep(100);
    closing(FakeEngine.serveAt(port, script(done(1))));
    assertEquals(List.of(1), starting.get(60, TimeUnit.SECONDS));
  }

  @Test
  void whatTheProgramsOwnCodeThrowsIsTheCause() throws IOException {
    FakeEngine fake = closing(FakeEngine.serve());
    IllegalStateException sealed = new IllegalStateException("the vault is sealed");
    Runnable fails = () -> {
      throw sealed;
    };
    for (EngineClient client : List.of(
        closing(fake.builder().reconnect(SLOW).intercept(new Intercepting(fails)).build()),
        closing(fake.builder().reconnect(SLOW).token(() -> {
          throw sealed;
        }).build()))) {
      EngineException error = refused(client);
      assertFalse(error.isUnreachable());
      assertSame(sealed, error.getCause());
      assertTrue(error.getMessage().contains("the vault is sealed"), error.getMessage());
      assertSame(sealed, assertThrows(EngineException.class, () -> client.getRun("r")).getCause());
    }
    assertEquals(List.of(), fake.calls);
  }

  @Test
  void aTokenThatFailsWhileAStreamIsTakenUpAgainIsAskedForAgain() throws IOException {
    FakeEngine fake = closing(FakeEngine.serve(script(delta(1), BROKEN), script(done(2))));
    AtomicInteger asked = new AtomicInteger();
    EngineClient client = closing(fake.builder().token(() -> {
      if (asked.incrementAndGet() == 2) {
        throw new IllegalStateException("the vault is sealed");
      }
      return "t" + asked;
    }).build());
    assertEquals(List.of(1, 2), seqs(client.ask("hi")));
    var key = Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
    assertEquals(List.of("Bearer t1", "Bearer t3"), fake.calls.stream().map(headers -> headers.get(key)).toList());
  }

  @Test
  void headersAreCheckedAndSentOnce() throws IOException {
    FakeEngine fake = closing(FakeEngine.serve(script(done(1)), script(done(1))));
    EngineClient.Builder builder = fake.builder().token("first").token("second\n").actingFor("t", "s");
    EngineClient client = closing(builder.build());
    builder.token("third"); // a client that is built stays as it is
    seqs(client.ask("hi"));
    Metadata sent = fake.calls.get(0);
    for (List<String> pair : List.of(List.of("authorization", "Bearer second"), List.of("dualclaw-tenant", "t"),
        List.of("dualclaw-subject", "s"))) {
      List<String> values = new ArrayList<>();
      sent.getAll(Metadata.Key.of(pair.get(0), Metadata.ASCII_STRING_MARSHALLER)).forEach(values::add);
      assertEquals(List.of(pair.get(1)), values);
    }
    for (String bad : List.of("a\nb", "schlüssel", "")) {
      var told = assertThrows(IllegalArgumentException.class, () -> fake.builder().token(bad));
      assertTrue(told.getMessage().startsWith("token must be"), told.getMessage());
    }
    assertThrows(NullPointerException.class, () -> fake.builder().token((String) null));
    assertThrows(NullPointerException.class, () -> fake.builder().reconnect(null));
    assertThrows(NullPointerException.class, () -> fake.builder().credentials(null));
    assertThrows(NullPointerException.class, () -> fake.builder().intercept(null));
  }

  @Test
  void whatAPlainStubSendsItselfWins() throws IOException {
    FakeEngine fake = closing(FakeEngine.serve());
    EngineClient client = closing(fake.builder().token("the client's").build());
    var key = Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
    Metadata own = new Metadata();
    own.put(key, "Bearer its own");
    client.engine().withInterceptors(MetadataUtils.newAttachHeadersInterceptor(own))
        .getRun(GetRunRequest.getDefaultInstance());
    List<String> sent = new ArrayList<>();
    fake.calls.get(0).getAll(key).forEach(sent::add);
    assertEquals(List.of("Bearer its own"), sent);
  }

  @Test
  void anAddressThatIsNoneIsToldSo() {
    for (String bad : List.of("", " ", "http://127.0.0.1:50051", "127.0.0.1", "127.0.0.1:port")) {
      var told = assertThrows(IllegalArgumentException.class, () -> EngineClient.connect(bad));
      assertTrue(told.getMessage().contains("HOST:PORT"), told.getMessage());
    }
    for (String good : List.of("[::1]:50051", "dns:///engine:50051", "engine.example:443")) {
      EngineClient.connect(good).close();
    }
  }

  @Test
  void aPlainStubThatIsKeptHasADeadlineForEachCall() throws Exception {
    FakeEngine fake = closing(FakeEngine.serve());
    List<Deadline> deadlines = new ArrayList<>();
    EngineClient client =
        closing(fake.builder().intercept(new Intercepting(options -> deadlines.add(options.getDeadline()))).build());
    var stub = client.engine();
    stub.getRun(GetRunRequest.getDefaultInstance());
    Thread.sleep(20);
    stub.getRun(GetRunRequest.getDefaultInstance());
    stub.withDeadlineAfter(1, TimeUnit.HOURS).getRun(GetRunRequest.getDefaultInstance());
    assertTrue(deadlines.get(0).isBefore(deadlines.get(1)));
    assertTrue(deadlines.get(2).timeRemaining(TimeUnit.MINUTES) > 50);
  }

  @Test
  void credentialsOfGrpcThatThrowFailAtOnce() throws IOException {
    FakeEngine fake = closing(FakeEngine.serve());
    IllegalStateException sealed = new IllegalStateException("the vault is sealed");
    CallCredentials failing = new CallCredentials() {
      @Override
      public void applyRequestMetadata(RequestInfo info, Executor executor, MetadataApplier applier) {
        throw sealed;
      }
    };
    EngineClient client = closing(fake.builder().reconnect(SLOW).credentials(
        io.grpc.CompositeChannelCredentials.create(io.grpc.InsecureChannelCredentials.create(), failing)).build());
    EngineException error = refused(client);
    assertEquals("UNAUTHENTICATED", error.reason());
    assertSame(sealed, error.getCause());
  }

  @Test
  void tlsCarriesTheTokenAndItsFaultsFailAtOnce(@TempDir Path folder) throws Exception {
    KeyStore keys = selfSigned(folder);
    KeyManagerFactory identity = KeyManagerFactory.getInstance(KeyManagerFactory.getDefaultAlgorithm());
    identity.init(keys, "secret".toCharArray());
    TrustManagerFactory trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
    trust.init(keys);
    FakeEngine secured = closing(new FakeEngine(
        0, TlsServerCredentials.newBuilder().keyManager(identity.getKeyManagers()).build())).play(script(done(1)));
    var trusting = TlsChannelCredentials.newBuilder().trustManager(trust.getTrustManagers()).build();
    assertEquals(List.of(1), seqs(closing(secured.builder().credentials(trusting).token("t").build()).ask("hi")));

    // Even where a start waits for its engine: that one answers, and no wait changes what it is. (The other end may
    // hang up before it is understood, which is a loss like any other; so more attempts are to follow quickly.)
    Reconnect patient = FakeEngine.QUICK.withTotal(Duration.ofDays(1)).withStart(Duration.ofDays(1));
    EngineException stranger = refused(closing(
        secured.builder().reconnect(patient).credentials(TlsChannelCredentials.create()).build()));
    assertTrue(stranger.isUnreachable());
    assertTrue(stranger.getMessage().contains("certif"), stranger.getMessage());
    FakeEngine plain = closing(FakeEngine.serve());
    EngineException mismatch =
        refused(closing(plain.builder().reconnect(patient).credentials(trusting).build()));
    assertTrue(mismatch.isUnreachable());
    assertTrue(mismatch.getMessage().contains("TLS"), mismatch.getMessage());
    // It only hangs up, as a lost one does.
    Reconnect soon = FakeEngine.QUICK.withTotal(Duration.ofSeconds(2));
    EngineException reverse = refused(closing(secured.builder().reconnect(soon).build()));
    assertTrue(reverse.isUnreachable());
    assertTrue(reverse.getMessage().contains("TLS"), reverse.getMessage());
  }

  @Test
  void whatSpeaksNoHttp2IsNoEngine() throws Exception {
    try (ServerSocket web = new ServerSocket(0)) {
      Thread answering = new Thread(() -> {
        try {
          while (true) {
            try (var socket = web.accept()) {
              socket.getInputStream().read(new byte[4096]);
              socket.getOutputStream().write("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n".getBytes());
            }
          }
        } catch (IOException over) {
          return;
        }
      });
      answering.start();
      assertTrue(refused(closing(
          EngineClient.builder("127.0.0.1:" + web.getLocalPort())
              .reconnect(FakeEngine.QUICK.withTotal(Duration.ofDays(1))).build())).isUnreachable());
    }
  }

  private static KeyStore selfSigned(Path folder) throws Exception {
    Path file = folder.resolve("keys.p12");
    Process keytool = new ProcessBuilder(Path.of(System.getProperty("java.home"), "bin", "keytool").toString(),
        "-genkeypair", "-alias", "engine", "-keyalg", "EC", "-dname", "CN=engine", "-ext", "san=ip:127.0.0.1",
        "-storepass", "secret", "-keystore", file.toString()).redirectErrorStream(true)
        .redirectOutput(new File(folder.toFile(), "keytool.log")).start();
    assertEquals(0, keytool.waitFor());
    KeyStore keys = KeyStore.getInstance("PKCS12");
    try (InputStream in = Files.newInputStream(file)) {
      keys.load(in, "secret".toCharArray());
    }
    keys.setCertificateEntry("trusted", keys.getCertificate("engine")); // it trusts only what is in it as one
    return keys;
  }
}
