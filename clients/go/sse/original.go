// Package sse writes the original SSE route of a dualclaw web gateway, byte for byte what its front-ends always got.
package sse

import (
	"strings"

	dualclaw "github.com/dualclaw/dualclaw-go"
	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

// Encoder turns the events of a run into frames of the original route; one per stream. The zero value is ready.
//
// Its front-ends only append text and know no rewind. So after a rewind text goes out only while the run's text starts
// with what was sent, and only the part beyond it; otherwise the content of done decides. interrupt is not sent: the
// waiting step says so itself.
type Encoder struct {
	text, reasoning shownText
}

// Encode returns the frames of an event, "" when nothing is to be sent.
func (e *Encoder) Encode(event *v1.EngineEvent) string {
	switch payload := event.GetPayload().(type) {
	case *v1.EngineEvent_Delta:
		return frameOf(e.text.add(payload.Delta.GetContent()), delta)
	case *v1.EngineEvent_Reasoning:
		return frameOf(e.reasoning.add(payload.Reasoning.GetContent()), reasoning)
	case *v1.EngineEvent_Rewind:
		return frameOf(e.reasoning.rewind(payload.Rewind.GetReasoning()), reasoning) +
			frameOf(e.text.rewind(payload.Rewind.GetContent()), delta)
	case *v1.EngineEvent_Done, *v1.EngineEvent_Error:
		e.text, e.reasoning = shownText{}, shownText{}
	}
	frame, _ := dualclaw.OriginalFrame(event)
	return frame
}

func delta(text string) *v1.EngineEvent {
	return &v1.EngineEvent{Payload: &v1.EngineEvent_Delta{Delta: &v1.Delta{Content: text}}}
}

func reasoning(text string) *v1.EngineEvent {
	return &v1.EngineEvent{Payload: &v1.EngineEvent_Reasoning{Reasoning: &v1.Reasoning{Content: text}}}
}

func frameOf(text *string, event func(string) *v1.EngineEvent) string {
	if text == nil {
		return ""
	}
	frame, _ := dualclaw.OriginalFrame(event(*text))
	return frame
}

type state int

const (
	inStep state = iota // what is shown is the run's text
	ahead               // the run's text was cut back to a beginning of what is shown, and is written again
	apart               // they differ: nothing appended would be right
)

// shownText is one text of a segment as an append-only front-end shows it.
type shownText struct {
	shown   strings.Builder
	state   state
	reached int // ahead: how much of what is shown the run's text has reached again
}

func (t *shownText) add(piece string) *string {
	switch t.state {
	case apart:
		return nil
	case ahead:
		again := t.shown.String()[t.reached:]
		if len(piece) < len(again) {
			if !strings.HasPrefix(again, piece) {
				t.state = apart
			}
			t.reached += len(piece)
			return nil
		}
		if !strings.HasPrefix(piece, again) {
			t.state = apart
			return nil
		}
		t.state = inStep
		return t.send(piece[len(again):])
	}
	t.shown.WriteString(piece)
	return &piece // also an empty one: it came as a delta
}

func (t *shownText) rewind(text string) *string {
	shown := t.shown.String()
	if beyond, ok := strings.CutPrefix(text, shown); ok {
		t.state = inStep
		return t.send(beyond)
	}
	if strings.HasPrefix(shown, text) {
		t.state, t.reached = ahead, len(text)
	} else {
		t.state = apart
	}
	return nil
}

// send notes text beyond what is shown and returns it; nothing is not sent.
func (t *shownText) send(beyond string) *string {
	if beyond == "" {
		return nil
	}
	t.shown.WriteString(beyond)
	return &beyond
}
