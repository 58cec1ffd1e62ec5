import { BinaryReader } from "@bufbuild/protobuf/wire";
import { Code, ConnectError } from "@connectrpc/connect";

/** The ErrorInfo domain of the engine's own errors. */
const DOMAIN = "dualclaw";

export interface EngineErrorDetails {
  /** Code of the gRPC status. */
  code: Code;
  metadata?: Readonly<Record<string, string>>;
  /** Field -> what is wrong with it, for INVALID_REQUEST. */
  fields?: Readonly<Record<string, string>>;
  /** Milliseconds after which another try may help. */
  retryAfterMs?: number | undefined;
  /** True when no engine was reached at all; tells the two meanings of STORE_UNAVAILABLE apart. */
  unreachable?: boolean;
  cause?: unknown;
}

/**
 * A call that failed: refused by the engine, or never answered by one. `reason` is a name of ErrorReason without its
 * prefix, such as "CONVERSATION_BUSY"; it is what programs decide on.
 */
export class EngineError extends Error {
  override readonly name = "EngineError";
  readonly code: Code;
  readonly metadata: Readonly<Record<string, string>>;
  readonly fields: Readonly<Record<string, string>>;
  readonly retryAfterMs: number | undefined;
  readonly unreachable: boolean;

  constructor(readonly reason: string, message: string, details: EngineErrorDetails) {
    super(message, { cause: details.cause });
    this.code = details.code;
    this.metadata = details.metadata ?? {};
    this.fields = details.fields ?? {};
    this.retryAfterMs = details.retryAfterMs;
    this.unreachable = details.unreachable ?? false;
  }
}

/** Reasons for statuses that bring none of their own, from a proxy or the transport. */
const FALLBACK = new Map([
  [Code.InvalidArgument, "INVALID_REQUEST"], [Code.Unauthenticated, "UNAUTHENTICATED"],
  [Code.PermissionDenied, "PERMISSION_DENIED"], [Code.ResourceExhausted, "OVERLOADED"],
  [Code.Unavailable, "STORE_UNAVAILABLE"],
]);

/** An error of a call, and whether the engine itself said it. */
export interface Judged {
  error: EngineError;
  own: boolean;
}

/** Reads an error of the transport with the rich status it brings. */
export function judge(thrown: unknown): Judged {
  if (thrown instanceof EngineError) return { error: thrown, own: true };
  const status = ConnectError.from(thrown);
  if (status.cause instanceof EngineError) return { error: status.cause, own: true }; // an interceptor threw it
  let reason = FALLBACK.get(status.code) ?? "INTERNAL";
  let own = false;
  let metadata: Record<string, string> = {};
  let fields: Record<string, string> = {};
  let retryAfterMs: number | undefined;
  for (const detail of status.details) {
    if (!("value" in detail) || !(detail.value instanceof Uint8Array)) continue;
    try {
      switch ((detail as { type: string }).type) {
        case "google.rpc.ErrorInfo": {
          const info = errorInfo(detail.value);
          if (info.domain !== DOMAIN) break;
          ({ reason, metadata } = info);
          own = true;
          break;
        }
        case "google.rpc.BadRequest":
          fields = violations(detail.value);
          break;
        case "google.rpc.RetryInfo":
          retryAfterMs = retryDelay(detail.value);
      }
    } catch {
      // A detail that cannot be read must not hide the failure that it details.
    }
  }
  const details = { code: status.code, metadata, fields, retryAfterMs, cause: thrown };
  return { error: new EngineError(reason, status.rawMessage, details), own };
}

// Three small messages of google/rpc/error_details.proto, read field by field: generated code for that one file would
// be as long as everything else here.

function errorInfo(bytes: Uint8Array): { reason: string; domain: string; metadata: Record<string, string> } {
  const found = { reason: "", domain: "", metadata: {} as Record<string, string> };
  eachField(bytes, (number, reader) => {
    if (number === 1) found.reason = reader.string();
    else if (number === 2) found.domain = reader.string();
    else if (number === 3) {
      const [key, value] = textPair(reader.bytes());
      found.metadata[key] = value;
    } else return false;
    return true;
  });
  return found;
}

function violations(bytes: Uint8Array): Record<string, string> {
  const found: Record<string, string> = {};
  eachField(bytes, (number, reader) => {
    if (number !== 1) return false;
    const [field, description] = textPair(reader.bytes());
    found[field] = description;
    return true;
  });
  return found;
}

function retryDelay(bytes: Uint8Array): number {
  let milliseconds = 0;
  eachField(bytes, (number, reader) => {
    if (number !== 1) return false;
    eachField(reader.bytes(), (part, duration) => {
      if (part === 1) milliseconds += Number(duration.int64()) * 1000;
      else if (part === 2) milliseconds += duration.int32() / 1_000_000;
      else return false;
      return true;
    });
    return true;
  });
  return milliseconds;
}

/** Reads a message whose fields 1 and 2 are texts; a map's entry is one, too. */
function textPair(bytes: Uint8Array): [string, string] {
  const pair: [string, string] = ["", ""];
  eachField(bytes, (number, reader) => {
    if (number !== 1 && number !== 2) return false;
    pair[number - 1] = reader.string();
    return true;
  });
  return pair;
}

function eachField(bytes: Uint8Array, read: (number: number, reader: BinaryReader) => boolean): void {
  const reader = new BinaryReader(bytes);
  while (reader.pos < reader.len) {
    const [number, wireType] = reader.tag();
    if (!read(number, reader)) reader.skip(wireType, number);
  }
}
