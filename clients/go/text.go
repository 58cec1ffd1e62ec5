package dualclaw

import (
	"strings"
	"unicode"

	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

// ToText returns what a channel without structure shows of an event; "" when that is nothing.
func ToText(event *v1.EngineEvent) string {
	switch payload := event.GetPayload().(type) {
	case *v1.EngineEvent_Delta:
		return payload.Delta.GetContent()
	case *v1.EngineEvent_Reasoning:
		return payload.Reasoning.GetContent()
	case *v1.EngineEvent_Step:
		diagnosis := payload.Step.GetStep().GetDiagnosis()
		switch diagnosis.GetSeverity() {
		case v1.Severity_SEVERITY_WARNING, v1.Severity_SEVERITY_ERROR:
			return DiagnosisText(diagnosis)
		}
		return ""
	case *v1.EngineEvent_Done:
		return payload.Done.GetContent()
	case *v1.EngineEvent_Error:
		if text := DiagnosisText(payload.Error.GetDiagnosis()); text != "" {
			return text
		}
		return strings.TrimRightFunc("❌ "+payload.Error.GetMessage(), isSpace)
	case *v1.EngineEvent_Interrupt:
		lines := make([]string, 0, len(payload.Interrupt.GetItems()))
		for _, item := range payload.Interrupt.GetItems() {
			lines = append(lines, questionText(item))
		}
		return strings.Join(lines, "\n")
	case *v1.EngineEvent_Rewind:
		return payload.Rewind.GetContent()
	}
	return ""
}

// DiagnosisText returns a diagnosis for people: an icon and the summary, then detail and hint on lines of their own.
// A severity newer than this package shows as info, a missing summary as the code; "" when nothing is there.
func DiagnosisText(diagnosis *v1.Diagnosis) string {
	if !hasContent(diagnosis) {
		return ""
	}
	icon := "ℹ️"
	switch diagnosis.GetSeverity() {
	case v1.Severity_SEVERITY_WARNING:
		icon = "⚠️"
	case v1.Severity_SEVERITY_ERROR:
		icon = "❌"
	}
	summary := strings.Join(lines(diagnosis.GetSummary()), " ")
	if summary == "" {
		summary = diagnosis.GetCode()
	}
	text := strings.TrimRightFunc(icon+" "+summary, isSpace)
	if diagnosis.GetDetail() != "" {
		text += "\n" + diagnosis.GetDetail()
	}
	if diagnosis.GetHint() != "" {
		text += "\n建议：" + diagnosis.GetHint()
	}
	return text
}

func questionText(item *v1.InterruptItem) string {
	if prompt := strings.Join(strings.FieldsFunc(item.GetPrompt(), isSpace), " "); prompt != "" {
		return prompt
	}
	if item.GetToolName() != "" {
		return item.GetToolName()
	}
	return item.GetId()
}

// isSpace is what the contract calls white space: Unicode's, and the four separators U+001C to U+001F.
func isSpace(r rune) bool {
	return unicode.IsSpace(r) || (r >= 0x1c && r <= 0x1f)
}

// lines splits at every line boundary Unicode knows; an empty text has no lines, a final boundary begins none.
func lines(text string) []string {
	text = strings.ReplaceAll(text, "\r\n", "\n")
	var found []string
	start := 0
	for at, r := range text {
		switch r {
		case '\n', '\r', '\v', '\f', 0x1c, 0x1d, 0x1e, 0x85, 0x2028, 0x2029:
			found = append(found, text[start:at])
			start = at + len(string(r))
		}
	}
	if start < len(text) {
		found = append(found, text[start:])
	}
	return found
}
