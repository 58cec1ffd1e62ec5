package dualclaw

import (
	"strings"
	"testing"
	"unicode/utf8"

	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

// Bytes that are no UTF-8 never reach the wire: they become U+FFFD, in texts and in arguments.
func TestBytesThatAreNoUTF8AreReplaced(t *testing.T) {
	for name, event := range map[string]*v1.EngineEvent{
		"text": {Payload: &v1.EngineEvent_Delta{Delta: &v1.Delta{Content: "a\xffb"}}},
		"arguments": {Payload: &v1.EngineEvent_Step{Step: &v1.StepEvent{
			Step: &v1.Step{Kind: v1.StepKind_STEP_KIND_SKILL, ArgsJson: "{\"k\": \"a\xffb\"}"},
		}}},
	} {
		if wire, ok := ToWire(event); !ok || !utf8.ValidString(wire) || !strings.Contains(wire, "a\uFFFDb") {
			t.Errorf("%s: %q", name, wire)
		}
	}
}
