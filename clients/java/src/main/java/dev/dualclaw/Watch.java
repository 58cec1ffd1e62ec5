package dev.dualclaw;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ForwardingClientCall.SimpleForwardingClientCall;
import io.grpc.ForwardingClientCallListener.SimpleForwardingClientCallListener;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;

/** Notes that an engine has answered: a message or headers came, or its own refusal. A proxy's status is neither. */
final class Watch implements ClientInterceptor {
  private volatile boolean reached;

  boolean reached() {
    return reached;
  }

  @Override
  public <Q, R> ClientCall<Q, R> interceptCall(MethodDescriptor<Q, R> method, CallOptions options, Channel next) {
    return new SimpleForwardingClientCall<>(next.newCall(method, options)) {
      @Override
      public void start(Listener<R> listener, Metadata headers) {
        super.start(new SimpleForwardingClientCallListener<>(listener) {
          @Override
          public void onHeaders(Metadata received) {
            reached = true;
            super.onHeaders(received);
          }

          @Override
          public void onClose(Status status, Metadata trailers) {
            if (!reached && (status.isOk() || EngineException.of(status, trailers).isOwn())) {
              reached = true;
            }
            super.onClose(status, trailers);
          }
        }, headers);
      }
    };
  }
}
