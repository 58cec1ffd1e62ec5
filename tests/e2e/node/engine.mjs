// EngineService from nothing but the .proto files.
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

export const connect = (target, root) => {
  const definition = loader.loadSync("dualclaw/v1/engine_service.proto", {
    includeDirs: [root],
    keepCase: true,
    enums: String,
    oneofs: true,
  });
  const { EngineService } = grpc.loadPackageDefinition(definition).dualclaw.v1;
  return new EngineService(target, grpc.credentials.createInsecure());
};

export const deadline = () => ({ deadline: Date.now() + 90_000 });

export const collect = (call) =>
  new Promise((resolve, reject) => {
    const events = [];
    call.on("data", (message) => events.push(...message.events));
    call.on("error", reject);
    call.on("end", () => resolve(events));
  });

export const codeOf = (call) => collect(call).then(() => 0, (error) => error.code);
