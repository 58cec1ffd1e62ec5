package dev.dualclaw;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.MethodDescriptor;
import java.util.function.Consumer;

/** Does something at each call, as the program's own interceptor. */
record Intercepting(Consumer<CallOptions> at) implements ClientInterceptor {
  Intercepting(Runnable at) {
    this(options -> at.run());
  }

  @Override
  public <Q, R> ClientCall<Q, R> interceptCall(MethodDescriptor<Q, R> method, CallOptions options, Channel next) {
    at.accept(options);
    return next.newCall(method, options);
  }
}
