package dev.dualclaw;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ForwardingClientCall.SimpleForwardingClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import java.time.Duration;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import java.util.regex.Pattern;

/**
 * Gives every call its headers, and a unary call without a deadline one.
 *
 * @param headers values by header name, asked for at each call
 */
record CallSetup(Map<String, Supplier<String>> headers) implements ClientInterceptor {
  private static final Duration UNARY_TIMEOUT = Duration.ofSeconds(30);
  private static final Pattern PRINTABLE = Pattern.compile("[\\x20-\\x7e]+");

  CallSetup {
    headers = Map.copyOf(headers);
  }

  /** Returns a header's value without space around it; its text is in no message, because it may be a secret. */
  static String checked(String name, String value) {
    String found = value.strip();
    if (!PRINTABLE.matcher(found).matches()) {
      throw new IllegalArgumentException(name + " must be printable ASCII and not empty: a header carries it");
    }
    return found;
  }

  @Override
  public <Q, R> ClientCall<Q, R> interceptCall(MethodDescriptor<Q, R> method, CallOptions options, Channel next) {
    // For each call, and not once for a stub: programs keep their stubs.
    boolean bounded = method.getType() != MethodDescriptor.MethodType.UNARY || options.getDeadline() != null;
    CallOptions own = bounded ? options : options.withDeadlineAfter(UNARY_TIMEOUT.toNanos(), TimeUnit.NANOSECONDS);
    return new SimpleForwardingClientCall<>(next.newCall(method, own)) {
      @Override
      public void start(Listener<R> listener, Metadata sent) {
        headers.forEach((name, value) -> {
          Metadata.Key<String> key = Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
          if (!sent.containsKey(key)) {
            sent.put(key, value.get());
          }
        });
        super.start(listener, sent);
      }
    };
  }
}
