package dev.dualclaw;

import static org.junit.jupiter.api.Assertions.assertEquals;

import com.google.protobuf.Timestamp;
import dev.dualclaw.v1.Delta;
import dev.dualclaw.v1.EngineEvent;
import dev.dualclaw.v1.Interrupt;
import dev.dualclaw.v1.InterruptItem;
import dev.dualclaw.v1.Step;
import dev.dualclaw.v1.StepEvent;
import dev.dualclaw.v1.StepKind;
import java.util.Locale;
import org.junit.jupiter.api.Test;

/** What the golden vectors cannot say, because it depends on where the program runs or on what only Java can hold. */
class WireTest {
  private static String args(String args) {
    return Wire.toWire(EngineEvent.newBuilder().setStep(StepEvent.newBuilder().setStep(
        Step.newBuilder().setKind(StepKind.STEP_KIND_SKILL).setArgsJson(args))).build()).orElseThrow();
  }

  @Test
  void theLocaleOfTheProgramChangesNothing() {
    Locale before = Locale.getDefault();
    try {
      for (String tag : new String[] {"ar-EG-u-nu-arab", "th-TH-u-nu-thai-ca-buddhist", "tr-TR"}) {
        Locale.setDefault(Locale.forLanguageTag(tag));
        assertEquals("{\"type\": \"step\", \"step\": {\"type\": \"skill\", \"name\": \"\", \"args\": "
            + "{\"a\": 1e-07, \"b\": \"\\u0001\"}, \"result\": \"\"}}", args("{\"a\": 1e-07, \"b\": \"\\u0001\"}"));
        EngineEvent asked = EngineEvent.newBuilder().setInterrupt(Interrupt.newBuilder().addItems(InterruptItem
            .newBuilder().setExpireTime(Timestamp.newBuilder().setSeconds(1).setNanos(5_000_000)))).build();
        assertEquals("{\"type\": \"interrupt\", \"items\": [{\"id\": \"\", \"kind\": \"\", "
            + "\"expire_time\": \"1970-01-01T00:00:01.005Z\"}]}", Wire.toWire(asked).orElseThrow());
      }
    } finally {
      Locale.setDefault(before);
    }
  }

  @Test
  void loneSurrogatesBecomeReplacementCharacters() {
    EngineEvent event = EngineEvent.newBuilder().setDelta(Delta.newBuilder().setContent("\ud800a\udc00🙂")).build();
    assertEquals("{\"type\": \"delta\", \"content\": \"\ufffda\ufffd🙂\"}", Wire.toWire(event).orElseThrow());
    assertEquals("\ufffda\ufffd🙂", Texts.toText(event));
    assertEquals("a\ufffdb", EngineClient.userMessage("a\ud800b").getParts(0).getText());
  }
}
