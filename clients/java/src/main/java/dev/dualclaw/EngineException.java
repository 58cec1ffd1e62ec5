package dev.dualclaw;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/**
 * A call that failed: refused by the engine, or never answered by one.
 *
 * <p>{@link #reason()} is a name of ErrorReason without its prefix, such as "CONVERSATION_BUSY"; it is what programs
 * decide on.
 */
public final class EngineException extends RuntimeException {
  private static final long serialVersionUID = 1;
  private static final String DOMAIN = "dualclaw";
  /** The most that protobuf's Duration may say. */
  private static final long LONGEST_DELAY = 315_576_000_000L;
  /** Reasons for statuses that bring none of their own, from a proxy or the transport. */
  private static final Map<Status.Code, String> FALLBACK = Map.of(
      Status.Code.INVALID_ARGUMENT, "INVALID_REQUEST", Status.Code.UNAUTHENTICATED, "UNAUTHENTICATED",
      Status.Code.PERMISSION_DENIED, "PERMISSION_DENIED", Status.Code.RESOURCE_EXHAUSTED, "OVERLOADED",
      Status.Code.UNAVAILABLE, "STORE_UNAVAILABLE");

  private final String reason;
  private final Status.Code code;
  private final transient Map<String, String> metadata;
  private final transient Map<String, String> fields;
  private final Duration retryAfter;
  private final boolean unreachable;
  private final boolean own;

  private EngineException(String reason, String message, Status.Code code, Map<String, String> metadata,
      Map<String, String> fields, Duration retryAfter, boolean unreachable, boolean own, Throwable cause) {
    super(message, cause);
    this.reason = reason;
    this.code = code;
    this.metadata = Map.copyOf(metadata);
    this.fields = Map.copyOf(fields);
    this.retryAfter = retryAfter;
    this.unreachable = unreachable;
    this.own = own;
  }

  static EngineException of(String reason, String message, Status.Code code, Throwable cause) {
    return new EngineException(reason, message, code, Map.of(), Map.of(), null, false, false, cause);
  }

  static EngineException unreachable(String message, Status.Code code, Throwable cause) {
    return new EngineException("STORE_UNAVAILABLE", message, code, Map.of(), Map.of(), null, true, false, cause);
  }

  /** Reads a status with the rich status its trailers bring. */
  static EngineException of(Status status, Metadata trailers) {
    String reason = FALLBACK.getOrDefault(status.getCode(), "INTERNAL");
    String message = status.getDescription() == null ? status.getCode().toString() : status.getDescription();
    Map<String, String> metadata = Map.of();
    Map<String, String> fields = new LinkedHashMap<>();
    Duration retryAfter = null;
    boolean own = false;
    for (Any detail : details(status, trailers)) {
      try {
        if (detail.is(ErrorInfo.class)) {
          ErrorInfo info = detail.unpack(ErrorInfo.class);
          if (info.getDomain().equals(DOMAIN)) {
            reason = info.getReason();
            metadata = info.getMetadataMap();
            own = true;
          }
        } else if (detail.is(BadRequest.class)) {
          detail.unpack(BadRequest.class).getFieldViolationsList()
              .forEach(violation -> fields.put(violation.getField(), violation.getDescription()));
        } else if (detail.is(RetryInfo.class)) {
          var delay = detail.unpack(RetryInfo.class).getRetryDelay();
          long seconds = Math.max(0, Math.min(delay.getSeconds(), LONGEST_DELAY));
          retryAfter = Duration.ofSeconds(seconds, Math.max(0, delay.getNanos()));
        }
      } catch (InvalidProtocolBufferException foreign) {
        continue; // another server's bytes; the other details still speak
      }
    }
    return new EngineException(
        reason, message, status.getCode(), metadata, fields, retryAfter, false, own, status.getCause());
  }

  /** Details that cannot be read, or belong to another status, are another server's. */
  private static List<Any> details(Status status, Metadata trailers) {
    try {
      return StatusProto.fromStatusAndTrailers(status, trailers).getDetailsList();
    } catch (IllegalArgumentException foreign) {
      return List.of();
    }
  }

  /** Name of ErrorReason without its prefix. */
  public String reason() {
    return reason;
  }

  /** Code of the gRPC status. */
  public Status.Code code() {
    return code;
  }

  /** What the engine says beside its reason, such as {@code run_id}. */
  public Map<String, String> metadata() {
    return metadata == null ? Map.of() : metadata;
  }

  /** Field to what is wrong with it, for INVALID_REQUEST. */
  public Map<String, String> fields() {
    return fields == null ? Map.of() : fields;
  }

  /** After how long another try may help, if that was said. */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(retryAfter);
  }

  /** True when no engine was reached at all; tells the two meanings of STORE_UNAVAILABLE apart. */
  public boolean isUnreachable() {
    return unreachable;
  }

  /** True when the engine itself said it. */
  boolean isOwn() {
    return own;
  }
}
