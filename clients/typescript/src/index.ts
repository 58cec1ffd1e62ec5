/** The TypeScript client of a dualclaw engine. Messages and enums are in "dualclaw/v1". */
export { canonicalArgs } from "./args.js";
export { EngineClient, userMessage, type CallOptions, type ClientOptions } from "./client.js";
export { EngineError, type EngineErrorDetails } from "./errors.js";
export { RECONNECT, type Reconnect } from "./reconnect.js";
export { RunStream } from "./stream.js";
export { diagnosisText, toText } from "./text.js";
export { RunView } from "./view.js";
export { frame, originalFrame, toWire } from "./wire.js";
