package dualclaw

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

const vectorFolder = "../../proto/vectors"

type vector struct {
	Name   string          `json:"name"`
	Event  json.RawMessage `json:"event"`
	Binary string          `json:"binary"`
	Wire   *string         `json:"wire"`
	Frame  *string         `json:"frame"`
	ToText *string         `json:"to_text"`
}

func readVectors(t *testing.T, path string) []vector {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var vectors []vector
	if err := json.Unmarshal(text, &vectors); err != nil {
		t.Fatal(err)
	}
	return vectors
}

// Every golden vector gives the same bytes here as in every other language.
func TestGoldenVectors(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(vectorFolder, "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no vectors in %s: %v", vectorFolder, err)
	}
	for _, file := range files {
		for _, vector := range readVectors(t, file) {
			t.Run(vector.Name, func(t *testing.T) { checkVector(t, vector) })
		}
	}
}

func checkVector(t *testing.T, vector vector) {
	event := &v1.EngineEvent{}
	if err := protojson.Unmarshal(vector.Event, event); err != nil {
		t.Fatal(err)
	}
	binary, err := hex.DecodeString(vector.Binary)
	if err != nil {
		t.Fatal(err)
	}
	decoded := &v1.EngineEvent{}
	if err := proto.Unmarshal(binary, decoded); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(event, decoded) {
		t.Errorf("binary is\n%v, JSON is\n%v", decoded, event)
	}
	wire, ok := ToWire(event)
	expect(t, "wire", wire, ok, vector.Wire)
	frame, ok := OriginalFrame(event)
	expect(t, "frame", frame, ok, vector.Frame)
	if text := ToText(event); text != *vector.ToText {
		t.Errorf("text is %q, expected %q", text, *vector.ToText)
	}
}

// Bytes of a newer engine are read: what is known of them has its wire form, the rest has none.
func TestEventsOfNewerEngines(t *testing.T) {
	for _, vector := range readVectors(t, filepath.Join(vectorFolder, "inputs/from_binary.json")) {
		t.Run(vector.Name, func(t *testing.T) {
			binary, err := hex.DecodeString(vector.Binary)
			if err != nil {
				t.Fatal(err)
			}
			event := &v1.EngineEvent{}
			if err := proto.Unmarshal(binary, event); err != nil {
				t.Fatal(err)
			}
			wire, ok := ToWire(event)
			expect(t, "wire", wire, ok, vector.Wire)
		})
	}
}

func expect(t *testing.T, what, got string, ok bool, wanted *string) {
	t.Helper()
	switch {
	case wanted == nil && ok:
		t.Errorf("%s is %q, expected none", what, got)
	case wanted != nil && !ok:
		t.Errorf("there is no %s, expected %q", what, *wanted)
	case wanted != nil && got != *wanted:
		t.Errorf("%s is\n%q, expected\n%q", what, got, *wanted)
	}
}
