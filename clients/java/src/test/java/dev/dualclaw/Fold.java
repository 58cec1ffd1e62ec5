package dev.dualclaw;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.dualclaw.v1.EngineEvent;
import dev.dualclaw.v1.StopReason;
import java.util.ArrayList;
import java.util.List;

/** What tests do with streams of events. */
final class Fold {
  private Fold() {}

  static List<EngineEvent> collect(RunStream stream) {
    List<EngineEvent> events = new ArrayList<>();
    stream.forEach(events::add);
    return events;
  }

  static RunView view(List<EngineEvent> events) {
    RunView view = new RunView();
    events.forEach(view::apply);
    return view;
  }

  /** Holds a whole run against the rules of the contract that a client can see: R1 to R8. */
  static void checkRules(List<EngineEvent> events) {
    RunView view = new RunView();
    String trace = "";
    for (int at = 0; at < events.size(); at++) {
      EngineEvent event = events.get(at);
      assertEquals(at + 1, event.getSeq(), "R1");
      if (view.terminal().isPresent() || trace.isEmpty()) {
        trace = event.getTraceId();
      }
      assertTrue(trace.matches("[0-9a-f]{32}"), "R8");
      assertEquals(trace, event.getTraceId(), "R8");
      assertEquals(events.get(0).getRunId(), event.getRunId(), "R8");
      if (at > 0 && events.get(at - 1).hasInterrupt()) {
        assertEquals(StopReason.STOP_REASON_INTERRUPTED, event.getDone().getStopReason(), "R3");
      }
      view.apply(event);
      if (event.hasDone()) {
        assertEquals(event.getDone().getContent(), view.text(), "R5");
        assertEquals(event.getDone().getProcessStepsList(), view.processSteps(), "R6");
        assertEquals(event.getDone().getUsedSkillsList(), view.usedSkills(), "R7");
        assertEquals(event.getDone().getUsedMcpList(), view.usedMcp(), "R7");
      }
    }
    assertTrue(view.terminal().isPresent(), "R2");
    if (view.interrupts().isEmpty()) {
      assertEquals(List.of(), view.openSteps(), "R4");
    }
  }
}
