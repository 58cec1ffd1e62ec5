/** The messages, enums and services of the contract. */
export * from "./gen/dualclaw/v1/agent_service_pb.js";
export * from "./gen/dualclaw/v1/conversation_service_pb.js";
export * from "./gen/dualclaw/v1/engine_service_pb.js";
export * from "./gen/dualclaw/v1/error_reason_pb.js";
export * from "./gen/dualclaw/v1/event_pb.js";
export * from "./gen/dualclaw/v1/message_pb.js";
export * from "./gen/dualclaw/v1/operator_service_pb.js";
export * from "./gen/dualclaw/v1/run_pb.js";
