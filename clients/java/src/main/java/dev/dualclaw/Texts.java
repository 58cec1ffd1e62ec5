package dev.dualclaw;

import dev.dualclaw.v1.Diagnosis;
import dev.dualclaw.v1.EngineEvent;
import dev.dualclaw.v1.InterruptItem;
import dev.dualclaw.v1.Severity;
import java.util.Arrays;
import java.util.stream.Collectors;

/** Events as text, for channels without structure. */
public final class Texts {
  /** White space as the contract means it: Unicode's, and the four separators U+001C to U+001F. */
  private static final String SPACES =
      "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+";
  private static final String LINE_ENDS = "\\r\\n|[\\n-\\r\\x1c-\\x1e\\x85\\u2028\\u2029]";

  private Texts() {}

  /** Returns what a channel without structure shows of an event; "" when that is nothing. */
  public static String toText(EngineEvent event) {
    return CanonicalArgs.wellFormed(text(event));
  }

  private static String text(EngineEvent event) {
    switch (event.getPayloadCase()) {
      case DELTA:
        return event.getDelta().getContent();
      case REASONING:
        return event.getReasoning().getContent();
      case STEP:
        Diagnosis found = event.getStep().getStep().getDiagnosis();
        boolean loud = found.getSeverity() == Severity.SEVERITY_WARNING || found.getSeverity() == Severity.SEVERITY_ERROR;
        return loud ? diagnosisText(found) : "";
      case DONE:
        return event.getDone().getContent();
      case ERROR:
        String text = diagnosisText(event.getError().getDiagnosis());
        return text.isEmpty() ? trimEnd("❌ " + event.getError().getMessage()) : text;
      case INTERRUPT:
        return event.getInterrupt().getItemsList().stream().map(Texts::question).collect(Collectors.joining("\n"));
      case REWIND:
        return event.getRewind().getContent();
      default:
        return "";
    }
  }

  /**
   * Returns a diagnosis for people: an icon and the summary, then detail and hint on lines of their own. A severity
   * newer than this package shows as info, a missing summary as the code; "" when nothing is there.
   */
  public static String diagnosisText(Diagnosis diagnosis) {
    if (!Wire.hasContent(diagnosis)) {
      return "";
    }
    String icon = switch (diagnosis.getSeverity()) {
      case SEVERITY_WARNING -> "⚠️";
      case SEVERITY_ERROR -> "❌";
      default -> "ℹ️";
    };
    String[] pieces = diagnosis.getSummary().split(LINE_ENDS, -1);
    boolean ended = pieces[pieces.length - 1].isEmpty(); // a final line end begins no line
    String summary = String.join(" ", Arrays.asList(pieces).subList(0, pieces.length - (ended ? 1 : 0)));
    StringBuilder out = new StringBuilder(trimEnd(icon + " " + (summary.isEmpty() ? diagnosis.getCode() : summary)));
    if (!diagnosis.getDetail().isEmpty()) {
      out.append('\n').append(diagnosis.getDetail());
    }
    if (!diagnosis.getHint().isEmpty()) {
      out.append("\n建议：").append(diagnosis.getHint());
    }
    return out.toString();
  }

  private static String question(InterruptItem item) {
    String prompt = Arrays.stream(item.getPrompt().split(SPACES)).filter(word -> !word.isEmpty())
        .collect(Collectors.joining(" "));
    if (!prompt.isEmpty()) {
      return prompt;
    }
    return item.getToolName().isEmpty() ? item.getId() : item.getToolName();
  }

  private static String trimEnd(String text) {
    return text.replaceAll(SPACES + "$", "");
  }
}
