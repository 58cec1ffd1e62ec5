package sse

import (
	"strings"
	"testing"

	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

func rewind(text, thought string) *v1.EngineEvent {
	return &v1.EngineEvent{Payload: &v1.EngineEvent_Rewind{Rewind: &v1.Rewind{Content: text, Reasoning: thought}}}
}

func done(text string) *v1.EngineEvent {
	return &v1.EngineEvent{Payload: &v1.EngineEvent_Done{Done: &v1.Done{Content: text}}}
}

// What an append-only front-end is sent around a rewind, as "+text" for the answer and "~text" for the reasoning.
func TestTextAfterARewind(t *testing.T) {
	for name, test := range map[string]struct {
		events []*v1.EngineEvent
		sent   string
	}{
		"in step":               {[]*v1.EngineEvent{delta("a"), delta("b")}, "+a+b"},
		"written again":         {[]*v1.EngineEvent{delta("abc"), rewind("a", ""), delta("b"), delta("cd")}, "+abc+d"},
		"written again at once": {[]*v1.EngineEvent{delta("abc"), rewind("", ""), delta("abcd")}, "+abc+d"},
		"exactly again":         {[]*v1.EngineEvent{delta("abc"), rewind("a", ""), delta("bc"), delta("d")}, "+abc+d"},
		"another text":          {[]*v1.EngineEvent{delta("abc"), rewind("a", ""), delta("x"), delta("bc")}, "+abc"},
		"another text, longer":  {[]*v1.EngineEvent{delta("abc"), rewind("a", ""), delta("bxy")}, "+abc"},
		"replaced":              {[]*v1.EngineEvent{delta("abc"), rewind("x", ""), delta("y")}, "+abc"},
		"together again":        {[]*v1.EngineEvent{delta("abc"), rewind("x", ""), rewind("abcd", "")}, "+abc+d"},
		"longer at once":        {[]*v1.EngineEvent{delta("你"), rewind("你好", ""), delta("🙂")}, "+你+好+🙂"},
		"reasoning first":       {[]*v1.EngineEvent{rewind("a", "t"), reasoning("u")}, "~t+a~u"},
		"apart from each other": {[]*v1.EngineEvent{delta("a"), reasoning("t"), rewind("x", "t"), reasoning("u"), delta("b")}, "+a~t~u"},
		"afresh after done":     {[]*v1.EngineEvent{delta("a"), rewind("x", ""), done("x"), delta("b")}, "+a|+b"},
	} {
		t.Run(name, func(t *testing.T) {
			var encoder Encoder
			var sent strings.Builder
			for _, event := range test.events {
				for _, frame := range strings.SplitAfter(encoder.Encode(event), "\n\n") {
					sent.WriteString(short(frame))
				}
			}
			if sent.String() != test.sent {
				t.Errorf("sent %s, expected %s", sent.String(), test.sent)
			}
		})
	}
}

func short(frame string) string {
	for head, mark := range map[string]string{
		`data: {"type": "delta", "content": "`:     "+",
		`data: {"type": "reasoning", "content": "`: "~",
	} {
		if text, ok := strings.CutPrefix(frame, head); ok {
			return mark + strings.TrimSuffix(text, "\"}\n\n")
		}
	}
	if frame != "" {
		return "|"
	}
	return ""
}

// Interrupts are not sent: the waiting step says so itself.
func TestInterruptsAreNotSent(t *testing.T) {
	var encoder Encoder
	interrupt := &v1.EngineEvent{Payload: &v1.EngineEvent_Interrupt{Interrupt: &v1.Interrupt{}}}
	if sent := encoder.Encode(interrupt); sent != "" {
		t.Errorf("sent %q", sent)
	}
}
