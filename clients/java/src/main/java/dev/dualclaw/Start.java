package dev.dualclaw;

import dev.dualclaw.v1.AttachRequest;
import dev.dualclaw.v1.AttachResponse;
import dev.dualclaw.v1.EngineEvent;
import dev.dualclaw.v1.EngineServiceGrpc;
import dev.dualclaw.v1.ResumeRequest;
import dev.dualclaw.v1.ResumeResponse;
import dev.dualclaw.v1.RunRequest;
import dev.dualclaw.v1.RunResponse;
import java.util.List;

/** What a stream begins with: one of the three streaming rpcs and its request. */
sealed interface Start {
  /** The run's id as far as the request knows it. */
  String runId();

  StreamCall open(EngineClient client);

  record OfRun(RunRequest request) implements Start {
    @Override
    public String runId() {
      return "";
    }

    @Override
    public StreamCall open(EngineClient client) {
      return StreamCall.start(client.channel(), EngineServiceGrpc.getRunMethod(), request, RunResponse::getEventsList);
    }
  }

  record OfResume(ResumeRequest request) implements Start {
    @Override
    public String runId() {
      return request.getRunId();
    }

    @Override
    public StreamCall open(EngineClient client) {
      return StreamCall.start(
          client.channel(), EngineServiceGrpc.getResumeMethod(), request, ResumeResponse::getEventsList);
    }
  }

  record OfAttach(AttachRequest request) implements Start {
    @Override
    public String runId() {
      return request.getRunId();
    }

    @Override
    public StreamCall open(EngineClient client) {
      return StreamCall.start(
          client.channel(), EngineServiceGrpc.getAttachMethod(), request, AttachResponse::getEventsList);
    }
  }

  /** The events of a message, and nothing else of it. */
  interface Events<T> {
    List<EngineEvent> of(T message);
  }
}
