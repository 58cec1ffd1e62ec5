package dev.dualclaw;

import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import org.junit.jupiter.api.Test;

class ReadmeTest {
  @Test
  void whatTheReadmeShowsIsCodeThatCompiles() throws IOException {
    String source = flat(Files.readString(Path.of("src/test/java/First.java")))
        + flat(Files.readString(Path.of("src/test/java/dev/dualclaw/Readme.java")));
    String[] blocks = Files.readString(Path.of("README.md")).split("```java\n");
    assertTrue(blocks.length > 4);
    for (int i = 1; i < blocks.length; i++) {
      String code = flat(blocks[i].substring(0, blocks[i].indexOf("```")));
      assertTrue(source.contains(code), code);
    }
  }

  private static String flat(String text) {
    return text.trim().replaceAll("\\s+", " ");
  }
}
