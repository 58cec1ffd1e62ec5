package dev.dualclaw;

import dev.dualclaw.v1.EngineEvent;
import dev.dualclaw.v1.InterruptItem;
import dev.dualclaw.v1.Phase;
import dev.dualclaw.v1.Step;
import dev.dualclaw.v1.StepEvent;
import dev.dualclaw.v1.StepKind;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;

/**
 * What a run has said so far. Give it every event in order; read it at any time. Not safe for several threads.
 *
 * <p>The text of a segment is its last rewind plus later deltas; the first event after a terminal one starts it afresh.
 * Steps live as long as the run, and the last event of an index replaces earlier ones whole.
 */
public final class RunView {
  /** Codes of failed steps that never ran, so their tool does not count as used. */
  private static final Set<String> NOT_CARRIED_OUT = Set.of(
      "tool.unknown", "tool.bad_arguments", "tool.rejected", "tool.skipped", "permission.denied");

  private final Map<Integer, Step> steps = new LinkedHashMap<>();
  private final StringBuilder text = new StringBuilder();
  private final StringBuilder reasoning = new StringBuilder();
  private List<InterruptItem> interrupts = List.of();
  private EngineEvent terminal;
  private int lastSeq;
  private int nextIndex;

  /** Takes in the next event. Returns false, and changes nothing, for a seq that was there already. */
  public boolean apply(EngineEvent event) {
    if (event.getSeq() > 0) {
      if (event.getSeq() <= lastSeq) {
        return false;
      }
      lastSeq = event.getSeq();
    }
    if (terminal != null) {
      terminal = null;
      interrupts = List.of();
      text.setLength(0);
      reasoning.setLength(0);
    }
    switch (event.getPayloadCase()) {
      case DELTA -> text.append(event.getDelta().getContent());
      case REASONING -> reasoning.append(event.getReasoning().getContent());
      case STEP -> step(event.getStep());
      case REWIND -> {
        text.replace(0, text.length(), event.getRewind().getContent());
        reasoning.replace(0, reasoning.length(), event.getRewind().getReasoning());
      }
      case INTERRUPT -> interrupts = event.getInterrupt().getItemsList();
      case DONE, ERROR -> terminal = event;
      default -> { }
    }
    return true;
  }

  private void step(StepEvent event) {
    int index = event.hasIndex() ? event.getIndex() : nextIndex; // an older producer says none
    steps.put(index, event.getStep());
    nextIndex = Math.max(nextIndex, index + 1);
  }

  /** Position of the newest event; 0 before the first. */
  public int lastSeq() {
    return lastSeq;
  }

  /** The done or error that ended the segment; empty while it is open. */
  public Optional<EngineEvent> terminal() {
    return Optional.ofNullable(terminal);
  }

  /** Open questions; none again once the next segment has begun. */
  public List<InterruptItem> interrupts() {
    return interrupts;
  }

  /** The answer of the segment so far. */
  public String text() {
    return text.toString();
  }

  /** The reasoning of the segment so far. */
  public String reasoning() {
    return reasoning.toString();
  }

  /** The steps of the run by index, in the order of their first event. */
  public Map<Integer, Step> steps() {
    return Collections.unmodifiableMap(steps);
  }

  /** The steps of the run in index order, as done lists them. */
  public List<Step> processSteps() {
    return List.copyOf(new TreeMap<>(steps).values());
  }

  /** Indexes of steps that have started and not ended. */
  public List<Integer> openSteps() {
    return steps.keySet().stream().filter(index -> steps.get(index).getPhase() == Phase.PHASE_START).toList();
  }

  /** Distinct names of skill steps that were carried out, in the order of their first start. */
  public List<String> usedSkills() {
    return used(StepKind.STEP_KIND_SKILL);
  }

  /** Distinct names of MCP steps that were carried out, in the order of their first start. */
  public List<String> usedMcp() {
    return used(StepKind.STEP_KIND_MCP);
  }

  private List<String> used(StepKind kind) {
    return steps.values().stream().filter(step -> step.getKind() == kind && carriedOut(step)).map(Step::getName)
        .distinct().toList();
  }

  private static boolean carriedOut(Step step) {
    return step.getPhase() == Phase.PHASE_OK
        || step.getPhase() == Phase.PHASE_FAIL && !NOT_CARRIED_OUT.contains(step.getDiagnosis().getCode());
  }
}
