package dev.dualclaw;

import io.grpc.Metadata;
import io.grpc.Status;
import java.net.ConnectException;
import java.net.NoRouteToHostException;
import java.net.UnknownHostException;
import java.nio.channels.ClosedChannelException;
import java.util.ArrayList;
import java.util.EnumSet;
import java.util.List;
import java.util.Set;
import javax.net.ssl.SSLException;

/**
 * A call that ended without OK; what is done about it depends on when.
 *
 * @param error what it means if nothing can be done
 * @param again the transport failed, so a start may be sent again
 * @param attach an attach may be tried again
 * @param connected false when no connection could be made
 */
record Lost(EngineException error, boolean again, boolean attach, boolean connected) {
  private static final Set<Status.Code> START_LOST =
      EnumSet.of(Status.Code.UNAVAILABLE, Status.Code.INTERNAL, Status.Code.CANCELLED, Status.Code.UNKNOWN);
  private static final Set<Status.Code> ATTACH_LOST = EnumSet.of(
      Status.Code.UNAVAILABLE, Status.Code.INTERNAL, Status.Code.CANCELLED, Status.Code.UNKNOWN, Status.Code.ABORTED,
      Status.Code.RESOURCE_EXHAUSTED, Status.Code.DEADLINE_EXCEEDED);
  private static final Set<String> ATTACH_LATER =
      Set.of("STORE_UNAVAILABLE", "OVERLOADED", "QUOTA_EXCEEDED", "SLOW_CLIENT");

  static Lost judge(Status status, Metadata trailers, String target) {
    EngineException error = EngineException.of(status, trailers == null ? new Metadata() : trailers);
    if (error.isOwn()) {
      return new Lost(error, false, ATTACH_LATER.contains(error.reason()), true);
    }
    Status.Code code = status.getCode();
    Throwable cause = status.getCause();
    if (code == Status.Code.CANCELLED && cause != null) { // gRPC's word for code of the program that threw
      return fault(cause, target);
    }
    List<Throwable> causes = causes(cause);
    boolean tls = causes.stream().anyMatch(SSLException.class::isInstance) && !hungUp(causes);
    boolean foreign = causes.stream().anyMatch(at -> said(at).startsWith("First received frame was not SETTINGS"));
    boolean connected = !tls && !foreign && causes.stream().noneMatch(at -> at instanceof ConnectException
        || at instanceof UnknownHostException || at instanceof NoRouteToHostException);
    if (code == Status.Code.UNAVAILABLE || tls || foreign) {
      String form = tls ? "no engine answers at %s, because TLS with it fails: %s"
          : foreign ? "no engine answers at %s, but something that wants TLS or speaks no HTTP/2: %s"
          : connected ? "the connection to the engine at %s broke: %s" : "no engine answers at %s: %s";
      error = EngineException.unreachable(form.formatted(target, words(error.getMessage(), causes)), code, cause);
    } else if (code == Status.Code.UNIMPLEMENTED) {
      String text = "what answers at %s is no dualclaw engine, or one of another version: %s"
          .formatted(target, error.getMessage());
      error = EngineException.of("INTERNAL", text, code, cause);
    }
    return new Lost(error, START_LOST.contains(code) && !tls && !foreign, ATTACH_LOST.contains(code), connected);
  }

  /** Judges what an interceptor or the token of the program itself threw: no loss of a start, but one of a stream. */
  static Lost fault(Throwable thrown, String target) {
    String text = "the call to the engine at %s could not be made: %s".formatted(target, said(thrown));
    return new Lost(EngineException.of("INTERNAL", text, Status.Code.UNKNOWN, thrown), false, true, true);
  }

  /** Judges a call that nothing came of in time. */
  static Lost silence(String target, long seconds) {
    String text = "the engine at %s did not answer within %d s".formatted(target, seconds);
    return new Lost(EngineException.unreachable(text, Status.Code.UNAVAILABLE, null), true, true, true);
  }

  private static List<Throwable> causes(Throwable cause) {
    List<Throwable> found = new ArrayList<>();
    for (Throwable at = cause; at != null && !found.contains(at); at = at.getCause()) {
      found.add(at);
    }
    return found;
  }

  /** A connection that ended in the middle of its handshake is lost like any other. */
  private static boolean hungUp(List<Throwable> causes) {
    return causes.stream().anyMatch(at -> at instanceof ClosedChannelException || said(at).contains("losed"));
  }

  /** gRPC says "io exception" and adds its pipeline; what happened is in the innermost cause. */
  private static String words(String message, List<Throwable> causes) {
    String first = message.lines().findFirst().orElse("");
    String root = causes.isEmpty() ? "" : said(causes.get(causes.size() - 1));
    if (first.startsWith("Network closed for unknown reason")) {
      return "it was closed before anything was said; an engine with TLS does so to a client without";
    }
    return root.isEmpty() || first.contains(root) ? first : first + ": " + root;
  }

  private static String said(Throwable thrown) {
    return thrown.getMessage() == null ? thrown.getClass().getName() : thrown.getMessage();
  }
}
