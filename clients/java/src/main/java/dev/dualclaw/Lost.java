package dev.dualclaw;

import io.grpc.Metadata;
import io.grpc.Status;
import java.net.ConnectException;
import java.net.NoRouteToHostException;
import java.net.UnknownHostException;
import java.util.EnumSet;
import java.util.Set;

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

  static Lost judge(Status status, Metadata trailers, EngineClient client) {
    EngineException error = EngineException.of(status, trailers == null ? new Metadata() : trailers);
    if (error.isOwn()) {
      return new Lost(error, false, ATTACH_LATER.contains(error.reason()), true);
    }
    boolean connected = !neverConnected(status.getCause());
    if (status.getCode() == Status.Code.UNAVAILABLE) {
      String text = (connected ? "the connection to the engine at %s broke: %s" : "no engine answers at %s: %s")
          .formatted(client.target(), error.getMessage());
      error = EngineException.unreachable(text, status.getCode(), status.getCause());
    } else if (status.getCode() == Status.Code.UNIMPLEMENTED) {
      String text = "what answers at %s is no dualclaw engine, or one of another version: %s"
          .formatted(client.target(), error.getMessage());
      error = EngineException.of("INTERNAL", text, status.getCode());
    }
    return new Lost(error, START_LOST.contains(status.getCode()), ATTACH_LOST.contains(status.getCode()), connected);
  }

  /** Tells from the transport's own error whether there was no connection at all. */
  private static boolean neverConnected(Throwable cause) {
    for (Throwable at = cause; at != null; at = at.getCause()) {
      if (at instanceof ConnectException || at instanceof UnknownHostException || at instanceof NoRouteToHostException) {
        return true;
      }
    }
    return false;
  }
}
