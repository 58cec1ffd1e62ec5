package dev.dualclaw;

import java.time.Duration;
import java.util.concurrent.ThreadLocalRandom;

/** The waits of a stream that is in trouble, counted from its last progress. */
final class BackOff {
  private final Reconnect limits;
  private int attempts;
  private long troubleSince;

  BackOff(Reconnect limits) {
    this.limits = limits;
  }

  boolean inTrouble() {
    return attempts > 0;
  }

  void progress() {
    attempts = 0;
  }

  /**
   * Counts one more failed attempt and returns the nanoseconds to wait before the next; negative when that would be
   * after the limit.
   */
  long next(Lost lost, Duration limit) {
    long now = System.nanoTime();
    long delay = 0;
    if (attempts == 0) {
      troubleSince = now;
    } else {
      double doubled = Reconnect.nanos(limits.first()) * Math.pow(2, Math.min(attempts - 1, 30));
      double longest = Math.min(Reconnect.nanos(limits.longest()), doubled);
      delay = (long) (longest * ThreadLocalRandom.current().nextDouble(0.5, 1.5));
      delay = Math.max(delay, lost.error().retryAfter().map(Reconnect::nanos).orElse(0L));
    }
    attempts++;
    return delay >= Reconnect.nanos(limit) - (now - troubleSince) ? -1 : delay;
  }
}
