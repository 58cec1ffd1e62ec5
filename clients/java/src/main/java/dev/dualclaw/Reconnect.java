package dev.dualclaw;

import java.time.Duration;

/**
 * How a lost stream is taken up again.
 *
 * @param total longest time without a new event before the stream fails; zero: never reconnect
 * @param first wait before the second attempt, doubled each time and spread by chance; the first one is made at once
 * @param longest longest wait between two attempts
 */
public record Reconnect(Duration total, Duration first, Duration longest) {
  /** 60 s in all, waits from 0.1 s to 3 s. */
  public static final Reconnect DEFAULT =
      new Reconnect(Duration.ofSeconds(60), Duration.ofMillis(100), Duration.ofSeconds(3));
}
