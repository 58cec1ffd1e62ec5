import dev.dualclaw.EngineClient;
import dev.dualclaw.RunStream;
import dev.dualclaw.v1.EngineEvent;

public class First {
  public static void main(String[] args) {
    try (EngineClient client = EngineClient.connect("127.0.0.1:50051");
        RunStream stream = client.ask("What is 17 * 23?")) {
      for (EngineEvent event : stream) {
        System.out.print(event.getDelta().getContent());
      }
    }
  }
}
