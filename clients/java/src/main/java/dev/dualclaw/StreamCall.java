package dev.dualclaw;

import dev.dualclaw.v1.EngineEvent;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/**
 * One streaming call, read by one thread. A message is asked for only when it is wanted, so a slow reader slows the
 * engine's stream down and fills no memory.
 */
final class StreamCall {
  /** What came: headers, the events of a message, or the end. */
  sealed interface Arrival permits Headers, Batch, End { }

  record Headers(Metadata metadata) implements Arrival { }

  record Batch(List<EngineEvent> events) implements Arrival { }

  record End(Status status, Metadata trailers) implements Arrival { }

  private final BlockingQueue<Arrival> arrived = new LinkedBlockingQueue<>();
  private final ClientCall<?, ?> call;
  private Arrival peeked;

  private StreamCall(ClientCall<?, ?> call) {
    this.call = call;
  }

  static <Q, R> StreamCall start(Channel channel, MethodDescriptor<Q, R> method, Q request, Start.Events<R> events) {
    ClientCall<Q, R> call = channel.newCall(method, CallOptions.DEFAULT);
    StreamCall stream = new StreamCall(call);
    ClientCall.Listener<R> listener = new ClientCall.Listener<>() {
      @Override
      public void onHeaders(Metadata headers) {
        stream.arrived.add(new Headers(headers));
      }

      @Override
      public void onMessage(R message) {
        stream.arrived.add(new Batch(events.of(message)));
      }

      @Override
      public void onClose(Status status, Metadata trailers) {
        stream.arrived.add(new End(status, trailers));
      }
    };
    try {
      call.start(listener, new Metadata());
      call.request(1);
      call.sendMessage(request);
      call.halfClose();
    } catch (RuntimeException | Error fault) {
      call.cancel("it could not be begun", fault);
      throw fault;
    }
    return stream;
  }

  /** Waits for what comes first without taking it; empty when nothing came in time. */
  Optional<Arrival> peek(Duration patience) throws InterruptedException {
    if (peeked == null) {
      peeked = arrived.poll(patience.toNanos(), TimeUnit.NANOSECONDS);
    }
    return Optional.ofNullable(peeked);
  }

  /** Waits for the next message or the end; headers are passed over. Empty when nothing came in time. */
  Optional<Arrival> next(Duration patience) throws InterruptedException {
    Optional<Arrival> found = peek(patience);
    peeked = null;
    if (found.isPresent() && found.get() instanceof Headers) {
      return next(patience);
    }
    if (found.isPresent() && found.get() instanceof Batch) {
      call.request(1);
    }
    return found;
  }

  void hangUp() {
    call.cancel("the reader has left", null);
  }
}
