package dev.dualclaw;

import java.time.Duration;
import java.util.Optional;

/**
 * How a lost stream is taken up again, as in {@code Reconnect.DEFAULT.withStart(Duration.ofSeconds(30))}.
 *
 * @param total longest time without a new event before the stream fails; zero: never reconnect
 * @param first wait before the second attempt, doubled each time and spread by chance; the first one is made at once
 * @param longest longest wait between two attempts
 * @param start longest time a start (run, resume, attach) waits while nobody answers at the engine's address; zero: not
 *     at all. Empty: total, but not at all before the client has reached its engine once
 */
public record Reconnect(Duration total, Duration first, Duration longest, Optional<Duration> start) {
  /** 60 s in all, waits from 0.1 s to 3 s; a start waits as long if the engine was there before. */
  public static final Reconnect DEFAULT =
      new Reconnect(Duration.ofSeconds(60), Duration.ofMillis(100), Duration.ofSeconds(3));

  /**
   * Checks the times.
   *
   * @throws IllegalArgumentException one is negative
   */
  public Reconnect {
    check("total", total);
    check("first", first);
    check("longest", longest);
    start.ifPresent(given -> check("start", given));
  }

  /** Leaves {@code start} empty. */
  public Reconnect(Duration total, Duration first, Duration longest) {
    this(total, first, longest, Optional.empty());
  }

  /** Returns a copy with another longest time without a new event. */
  public Reconnect withTotal(Duration total) {
    return new Reconnect(total, first, longest, start);
  }

  /** Returns a copy with another wait before the second attempt. */
  public Reconnect withFirst(Duration first) {
    return new Reconnect(total, first, longest, start);
  }

  /** Returns a copy with another longest wait between two attempts. */
  public Reconnect withLongest(Duration longest) {
    return new Reconnect(total, first, longest, start);
  }

  /** Returns a copy whose starts wait as long for an engine, whether it was there before or not. */
  public Reconnect withStart(Duration start) {
    return new Reconnect(total, first, longest, Optional.of(start));
  }

  private static void check(String name, Duration given) {
    if (given.isNegative()) {
      throw new IllegalArgumentException(name + " must be zero or longer, not " + given);
    }
  }

  /** Returns a time as nanoseconds; what is too long for them is endless. */
  static long nanos(Duration time) {
    try {
      return time.toNanos();
    } catch (ArithmeticException endless) {
      return Long.MAX_VALUE;
    }
  }
}
