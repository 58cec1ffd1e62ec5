package dev.dualclaw;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;

import com.google.gson.Gson;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.protobuf.util.JsonFormat;
import dev.dualclaw.v1.EngineEvent;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.stream.Stream;
import org.junit.jupiter.api.DynamicTest;
import org.junit.jupiter.api.TestFactory;

/** Every golden vector gives the same bytes here as in every other language. */
class VectorsTest {
  private static final Path FOLDER = Path.of("../../proto/vectors");

  @TestFactory
  List<DynamicTest> golden() throws IOException {
    List<DynamicTest> tests = new ArrayList<>();
    try (Stream<Path> files = Files.list(FOLDER)) {
      for (Path file : files.filter(path -> path.toString().endsWith(".json")).sorted().toList()) {
        for (JsonElement element : read(file)) {
          JsonObject vector = element.getAsJsonObject();
          String name = "golden " + vector.get("name").getAsString();
          tests.add(DynamicTest.dynamicTest(name, () -> check(vector)));
        }
      }
    }
    assertFalse(tests.isEmpty());
    return tests;
  }

  private static void check(JsonObject vector) throws IOException {
    EngineEvent.Builder event = EngineEvent.newBuilder();
    JsonFormat.parser().merge(vector.get("event").toString(), event);
    assertEquals(event.build(), EngineEvent.parseFrom(HexFormat.of().parseHex(vector.get("binary").getAsString())));
    assertEquals(text(vector, "wire"), Wire.toWire(event.build()).orElse(null));
    assertEquals(text(vector, "frame"), Wire.originalFrame(event.build()).orElse(null));
    assertEquals(text(vector, "to_text"), Texts.toText(event.build()));
  }

  @TestFactory
  List<DynamicTest> eventsOfNewerEngines() throws IOException {
    List<DynamicTest> tests = new ArrayList<>();
    for (JsonElement element : read(FOLDER.resolve("inputs/from_binary.json"))) {
      JsonObject vector = element.getAsJsonObject();
      tests.add(DynamicTest.dynamicTest(vector.get("name").getAsString(), () -> {
        EngineEvent event = EngineEvent.parseFrom(HexFormat.of().parseHex(vector.get("binary").getAsString()));
        assertEquals(text(vector, "wire"), Wire.toWire(event).orElse(null));
      }));
    }
    return tests;
  }

  private static JsonArray read(Path file) throws IOException {
    return new Gson().fromJson(Files.readString(file), JsonArray.class);
  }

  private static String text(JsonObject vector, String key) {
    return vector.get(key).isJsonNull() ? null : vector.get(key).getAsString();
  }
}
