package dev.dualclaw;

import dev.dualclaw.v1.EngineEvent;
import java.util.Iterator;
import java.util.concurrent.CancellationException;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

/**
 * Reads a stream for one subscriber, on one thread of an executor.
 *
 * <p>Not by SubmissionPublisher: it reads ahead of the subscriber, so that lastSeq would count events nobody has seen;
 * it notices a cancellation with the next event only, which a silent run never sends; and it needs a second thread.
 */
final class Subscription implements Flow.Subscription, Runnable {
  private final RunStream stream;
  private final Flow.Subscriber<? super EngineEvent> subscriber;
  private final ReentrantLock lock = new ReentrantLock();
  private final Condition changed = lock.newCondition();
  private Iterator<EngineEvent> events;
  private long demand;
  private boolean cancelled;
  private Throwable fault;

  private Subscription(RunStream stream, Flow.Subscriber<? super EngineEvent> subscriber) {
    this.stream = stream;
    this.subscriber = subscriber;
  }

  static void start(RunStream stream, Flow.Subscriber<? super EngineEvent> subscriber, Executor executor) {
    Subscription subscription = new Subscription(stream, subscriber);
    try {
      subscription.events = stream.iterator();
    } catch (IllegalStateException second) {
      subscriber.onSubscribe(subscription);
      subscriber.onError(second);
      return;
    }
    stream.onLeave(subscription::wake);
    try {
      subscriber.onSubscribe(subscription);
    } catch (RuntimeException error) {
      stream.close();
      throw error;
    }
    try {
      executor.execute(subscription);
    } catch (RejectedExecutionException refused) {
      stream.close();
      subscriber.onError(refused);
    }
  }

  @Override
  public void request(long count) {
    lock.lock();
    try {
      if (count > 0) {
        demand = demand + count < 0 ? Long.MAX_VALUE : demand + count;
        changed.signalAll();
        return;
      }
      fault = new IllegalArgumentException("a subscriber must request 1 event or more, not " + count);
    } finally {
      lock.unlock();
    }
    stream.close();
  }

  @Override
  public void cancel() {
    lock.lock();
    try {
      cancelled = true;
    } finally {
      lock.unlock();
    }
    stream.close();
  }

  @Override
  public void run() {
    Throwable error = null;
    try {
      while (events.hasNext() && awaitDemand()) {
        subscriber.onNext(events.next());
      }
      stream.throwIfCutOff();
    } catch (RuntimeException | Error thrown) {
      error = thrown;
    }
    stream.close();
    lock.lock();
    try {
      if (cancelled) {
        return;
      }
      error = fault == null ? error : fault;
    } finally {
      lock.unlock();
    }
    if (error == null) {
      subscriber.onComplete();
    } else {
      subscriber.onError(error);
    }
  }

  /** Waits until an event is wanted; false when the stream was left. */
  private boolean awaitDemand() {
    lock.lock();
    try {
      while (demand == 0 && !stream.isLeft()) {
        changed.await();
      }
      if (stream.isLeft()) {
        return false;
      }
      demand -= demand == Long.MAX_VALUE ? 0 : 1;
      return true;
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw new CancellationException("interrupted while waiting for the subscriber");
    } finally {
      lock.unlock();
    }
  }

  private void wake() {
    lock.lock();
    try {
      changed.signalAll();
    } finally {
      lock.unlock();
    }
  }
}
