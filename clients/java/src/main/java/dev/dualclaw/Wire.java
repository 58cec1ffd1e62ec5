package dev.dualclaw;

import static dev.dualclaw.CanonicalArgs.quote;

import com.google.protobuf.Timestamp;
import dev.dualclaw.v1.DecisionAction;
import dev.dualclaw.v1.Diagnosis;
import dev.dualclaw.v1.Done;
import dev.dualclaw.v1.EngineEvent;
import dev.dualclaw.v1.InterruptItem;
import dev.dualclaw.v1.InterruptKind;
import dev.dualclaw.v1.Phase;
import dev.dualclaw.v1.Rewind;
import dev.dualclaw.v1.Severity;
import dev.dualclaw.v1.Step;
import dev.dualclaw.v1.StepKind;
import java.time.Instant;
import java.time.ZoneOffset;
import java.time.format.DateTimeFormatter;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.stream.Collectors;

/**
 * The event wire format: JSON text byte for byte as every other language writes it. {@code args_json} is copied, so no
 * integer loses a digit.
 */
public final class Wire {
  // What is not in these tables has no name on the wire.
  private static final Map<StepKind, String> KINDS = Map.of(
      StepKind.STEP_KIND_THINKING, "thinking", StepKind.STEP_KIND_SKILL, "skill", StepKind.STEP_KIND_MCP, "mcp",
      StepKind.STEP_KIND_AGENT, "agent", StepKind.STEP_KIND_KB, "kb", StepKind.STEP_KIND_MEDIA, "media");
  private static final Map<Phase, String> PHASES =
      Map.of(Phase.PHASE_START, "start", Phase.PHASE_OK, "ok", Phase.PHASE_FAIL, "fail");
  private static final Map<Severity, String> SEVERITIES = Map.of(
      Severity.SEVERITY_INFO, "info", Severity.SEVERITY_WARNING, "warning", Severity.SEVERITY_ERROR, "error");
  private static final Map<InterruptKind, String> INTERRUPTS = Map.of(
      InterruptKind.INTERRUPT_KIND_APPROVAL, "approval", InterruptKind.INTERRUPT_KIND_QUESTION, "question");
  private static final Map<DecisionAction, String> ACTIONS = Map.of(
      DecisionAction.DECISION_ACTION_APPROVE, "approve", DecisionAction.DECISION_ACTION_REJECT, "reject",
      DecisionAction.DECISION_ACTION_EDIT, "edit", DecisionAction.DECISION_ACTION_SKIP, "skip",
      DecisionAction.DECISION_ACTION_RESPOND, "respond");
  private static final DateTimeFormatter SECONDS =
      DateTimeFormatter.ofPattern("uuuu-MM-dd'T'HH:mm:ss", Locale.ROOT).withZone(ZoneOffset.UTC);
  private static final long FIRST_SECOND = -62135596800L;
  private static final long LAST_SECOND = 253402300799L;

  private Wire() {}

  /**
   * Returns the wire form of an event. Empty for an event that has none, which is skipped: its payload, or the kind of
   * its step, is unset or newer than this package.
   */
  public static Optional<String> toWire(EngineEvent event) {
    return payload(event).map(json -> {
      if (event.getSeq() > 0) {
        json.raw("seq", Integer.toString(event.getSeq()));
      }
      return json.ifAny("trace_id", event.getTraceId()).ifAny("tenant_id", event.getTenantId())
          .ifAny("claw", event.getClaw()).ifAny("run_id", event.getRunId()).close();
    });
  }

  /** Returns the SSE frame around a wire text. */
  public static String frame(String wire) {
    return "data: " + wire + "\n\n";
  }

  /**
   * Returns the frame of the original SSE route for an event by itself: thinned of its envelope, but with the trace_id
   * on done and error. Empty for what that route does not carry.
   */
  public static Optional<String> originalFrame(EngineEvent event) {
    switch (event.getPayloadCase()) {
      case INTERRUPT, REWIND:
        return Optional.empty();
      case DONE, ERROR:
        return payload(event).map(json -> frame(json.ifAny("trace_id", event.getTraceId()).close()));
      default:
        return payload(event).map(json -> frame(json.close()));
    }
  }

  static boolean hasContent(Diagnosis diagnosis) {
    return !diagnosis.getCode().isEmpty() || SEVERITIES.containsKey(diagnosis.getSeverity())
        || !diagnosis.getSummary().isEmpty() || !diagnosis.getDetail().isEmpty() || !diagnosis.getHint().isEmpty()
        || diagnosis.getRetryable();
  }

  private static Optional<Json> payload(EngineEvent event) {
    switch (event.getPayloadCase()) {
      case DELTA:
        return Optional.of(new Json().text("type", "delta").text("content", event.getDelta().getContent()));
      case REASONING:
        return Optional.of(new Json().text("type", "reasoning").text("content", event.getReasoning().getContent()));
      case STEP:
        if (!KINDS.containsKey(event.getStep().getStep().getKind())) {
          return Optional.empty();
        }
        Json step = new Json().text("type", "step").raw("step", step(event.getStep().getStep()));
        if (event.getStep().hasIndex() && event.getStep().getIndex() >= 0) {
          step.raw("index", Integer.toString(event.getStep().getIndex()));
        }
        return Optional.of(step);
      case DONE:
        return Optional.of(done(event.getDone()));
      case ERROR:
        return Optional.of(diagnosed(
            new Json().text("type", "error").text("message", event.getError().getMessage()),
            event.getError().getDiagnosis()));
      case INTERRUPT:
        String items = event.getInterrupt().getItemsList().stream().map(Wire::item)
            .collect(Collectors.joining(", ", "[", "]"));
        return Optional.of(new Json().text("type", "interrupt").raw("items", items));
      case REWIND:
        Rewind rewind = event.getRewind();
        Json json = new Json().text("type", "rewind").text("content", rewind.getContent())
            .ifAny("reasoning", rewind.getReasoning()).ifAny("reason", rewind.getReason());
        if (rewind.getAttempt() > 0) {
          json.raw("attempt", Integer.toString(rewind.getAttempt()));
        }
        return Optional.of(json);
      default:
        return Optional.empty();
    }
  }

  private static String step(Step step) {
    String kind = KINDS.get(step.getKind());
    Json json = new Json().text("type", kind);
    if (kind.equals("thinking")) {
      json.text("text", step.getText());
    } else {
      if (kind.equals("mcp")) {
        json.text("server", step.getServer());
      }
      json.text("name", step.getName()).raw("args", CanonicalArgs.of(step.getArgsJson()))
          .text("result", step.getResult());
    }
    diagnosed(json, step.getDiagnosis()).ifAny("phase", PHASES.getOrDefault(step.getPhase(), ""));
    var node = step.getNode();
    if (!(node.getId() + node.getType() + node.getLabel()).isEmpty()) {
      json.raw("node", new Json().text("id", node.getId()).text("type", node.getType())
          .text("label", node.getLabel()).close());
    }
    return json.close();
  }

  private static Json done(Done done) {
    String steps = done.getProcessStepsList().stream()
        .filter(step -> KINDS.containsKey(step.getKind())) // a newer kind is left out, the done itself never
        .map(Wire::step).collect(Collectors.joining(", ", "[", "]"));
    return new Json().text("type", "done").text("message_id", done.getMessageId())
        .text("conversation_id", done.getConversationId()).text("content", done.getContent())
        .raw("process_steps", steps).raw("used_skills", texts(done.getUsedSkillsList()))
        .raw("used_mcp", texts(done.getUsedMcpList())).raw("generating", Boolean.toString(done.getGenerating()));
  }

  private static String item(InterruptItem item) {
    List<String> actions = item.getAllowedActionsList().stream().filter(ACTIONS::containsKey).map(ACTIONS::get).toList();
    Json json = new Json().text("id", item.getId()).text("kind", INTERRUPTS.getOrDefault(item.getKind(), ""))
        .ifAny("tool_name", item.getToolName()).ifObject("args", item.getArgsJson()).ifAny("prompt", item.getPrompt());
    if (!actions.isEmpty()) {
      json.raw("allowed_actions", texts(actions));
    }
    json.ifObject("response_schema", item.getResponseSchemaJson());
    if (item.getPathCount() > 0) {
      json.raw("path", texts(item.getPathList()));
    }
    String expires = item.hasExpireTime() ? time(item.getExpireTime()) : "";
    return json.ifAny("args_hash", item.getArgsHash()).ifAny("expire_time", expires).close();
  }

  private static Json diagnosed(Json json, Diagnosis diagnosis) {
    if (!hasContent(diagnosis)) {
      return json;
    }
    return json.raw("diagnosis", new Json().text("code", diagnosis.getCode())
        .text("severity", SEVERITIES.getOrDefault(diagnosis.getSeverity(), ""))
        .text("summary", diagnosis.getSummary()).text("detail", diagnosis.getDetail())
        .text("hint", diagnosis.getHint()).raw("retryable", Boolean.toString(diagnosis.getRetryable())).close());
  }

  private static String texts(List<String> values) {
    return values.stream().map(CanonicalArgs::quote).collect(Collectors.joining(", ", "[", "]"));
  }

  /** Prints a time as RFC 3339 with as many groups of three digits as it needs; nothing when out of range. */
  private static String time(Timestamp moment) {
    long seconds = moment.getSeconds();
    int nanos = moment.getNanos();
    if (seconds < FIRST_SECOND || seconds > LAST_SECOND || nanos < 0 || nanos > 999_999_999) {
      return "";
    }
    String fraction = String.format(Locale.ROOT, "%09d", nanos).replaceAll("(000)+$", "");
    return SECONDS.format(Instant.ofEpochSecond(seconds)) + (fraction.isEmpty() ? "" : "." + fraction) + "Z";
  }

  /** An object that is being written, its members in the order they come. */
  private static final class Json {
    private final StringBuilder out = new StringBuilder("{");

    Json raw(String key, String json) {
      if (out.length() > 1) {
        out.append(", ");
      }
      out.append('"').append(key).append("\": ").append(json);
      return this;
    }

    Json text(String key, String text) {
      return raw(key, quote(text));
    }

    Json ifAny(String key, String text) {
      return text.isEmpty() ? this : text(key, text);
    }

    Json ifObject(String key, String json) {
      String object = CanonicalArgs.of(json);
      return object.equals("{}") ? this : raw(key, object);
    }

    String close() {
      return out.append('}').toString();
    }
  }
}
