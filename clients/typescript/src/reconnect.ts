/** How a lost stream is taken up again; all in milliseconds. */
export interface Reconnect {
  /** Longest time without a new event before the stream fails; 0: never reconnect. */
  totalMs: number;
  /** Wait before the second attempt, doubled each time and spread by chance; the first one is made at once. */
  firstMs: number;
  /** Longest wait between two attempts. */
  longestMs: number;
  /**
   * Longest time a start (run, resume, attach) waits while nobody answers at the engine's address; 0: not at all.
   * Without it: totalMs, but not at all before this client has reached its engine once.
   */
  startMs?: number;
}

export const RECONNECT: Readonly<Reconnect> = { totalMs: 60_000, firstMs: 100, longestMs: 3_000 };

/** Checks given values and adds the defaults. */
export function reconnectOf(given: Partial<Reconnect> = {}): Reconnect {
  const whole: Reconnect = { ...RECONNECT };
  for (const key of ["totalMs", "firstMs", "longestMs", "startMs"] as const) {
    const value = given[key];
    if (value === undefined) continue;
    if (typeof value !== "number" || !(value >= 0)) {
      throw new TypeError(`reconnect.${key} must be a number of milliseconds, 0 or more, not ${String(value)}`);
    }
    whole[key] = value;
  }
  return whole;
}
