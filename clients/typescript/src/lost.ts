import { Code, ConnectError } from "@connectrpc/connect";

import { EngineError, judge } from "./errors.js";

// Aborted is what connect makes of a connection that was reset.
const START_LOST = new Set([Code.Unavailable, Code.Internal, Code.Canceled, Code.Unknown, Code.Aborted]);
const ATTACH_LOST = new Set([...START_LOST, Code.ResourceExhausted, Code.DeadlineExceeded]);
const ATTACH_LATER = new Set(["STORE_UNAVAILABLE", "OVERLOADED", "QUOTA_EXCEEDED", "SLOW_CLIENT"]);
/** Nobody listens, or what listens speaks no HTTP/2 or no TLS that is trusted. */
const NO_CONNECTION = new RegExp(
  "^(ECONNREFUSED|ENOTFOUND|EAI_AGAIN|EHOSTUNREACH|ENETUNREACH|EPROTO|ERR_HTTP2_ERROR|ERR_(SSL|TLS)_.*|CERT_.*" +
  "|HOSTNAME_MISMATCH|DEPTH_ZERO_SELF_SIGNED_CERT|SELF_SIGNED_CERT_IN_CHAIN|UNABLE_TO_.*)$",
);

/** A call that ended without OK; what is done about it depends on when. */
export class Lost extends Error {
  constructor(
    readonly error: EngineError,
    /** The transport failed, so a start may be sent again. */
    readonly again: boolean,
    /** An attach may be tried again. */
    readonly attach: boolean,
    readonly connected = true,
  ) {
    super(error.message);
  }
}

/** Reads what a call threw; `place` is the engine's address. */
export function lostBy(thrown: unknown, place: string): Lost {
  if (thrown instanceof Lost) return thrown;
  const { error, own } = judge(thrown);
  if (own) return new Lost(error, false, ATTACH_LATER.has(error.reason));
  const fault = localFault(thrown);
  if (fault) {
    const text = `the call to the engine at ${place} could not be made: ${fault.message}`;
    return new Lost(new EngineError("INTERNAL", text, { code: error.code, cause: fault }), false, true);
  }
  const connected = !NO_CONNECTION.test(causeCode(thrown));
  let said = error;
  if (START_LOST.has(error.code)) {
    const words = error.message.trim();
    const text = connected
      ? `the connection to the engine at ${place} broke: ${words}`
      : `no engine answers at ${place}: ${words}`;
    said = new EngineError("STORE_UNAVAILABLE", text, { code: error.code, unreachable: true, cause: thrown });
  } else if (error.code === Code.Unimplemented) {
    const text = `what answers at ${place} is no dualclaw engine, or one of another version: ${error.message}`;
    said = new EngineError("INTERNAL", text, { code: error.code, cause: thrown });
  }
  return new Lost(said, START_LOST.has(error.code), ATTACH_LOST.has(error.code), connected);
}

/** Returns what a failed call means to whom it is not repeated for. */
export function finalError(thrown: unknown, place: string): EngineError {
  return lostBy(thrown, place).error;
}

/** Returns what a token function or an interceptor threw. Node's own errors have a code, statuses have no cause. */
function localFault(thrown: unknown): Error | undefined {
  if (!(thrown instanceof ConnectError) || thrown.code !== Code.Unknown) return undefined;
  return thrown.cause instanceof Error && causeCode(thrown) === "" ? thrown.cause : undefined;
}

function causeCode(thrown: unknown): string {
  for (let at = thrown; at instanceof Error; at = at.cause) {
    if ("code" in at && typeof at.code === "string") return at.code;
  }
  return "";
}
